"""Training rows: repeated sequences, facts in documents, chats about documents, and plain text.

A row is (ids, weights): `weights[i]` is how much predicting token i counts. What cannot be known (which value a name
gets at its first mention, which name is asked next) counts little or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from models.corpus import IntArray, Words

FloatArray = npt.NDArray[np.float32]
Row = tuple[IntArray, FloatArray]

TEXT_WEIGHT = 0.3
PRIOR_WEIGHT = 0.02


@dataclass
class Draft:
    """A row under construction."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, ids: list[int], weight: float) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)

    def fact(self, name: int, value: int, newline: int, weight: float) -> None:
        self.ids += [name, value, newline]
        self.weights += [0.0, weight, weight * 0.1]

    def row(self, length: int) -> Row:
        return np.array(self.ids[:length], dtype=np.int64), np.array(self.weights[:length], dtype=np.float32)


@dataclass(frozen=True)
class Document:
    """Ids of a document and what it says: `facts[name id] = value id`."""

    ids: list[int]
    weights: list[float]
    facts: dict[int, int]


class Generator:
    """Draws rows; everything random comes from the generator that is passed in."""

    def __init__(self, words: Words, text: IntArray) -> None:
        self.words = words
        self.text = text
        self.starts = np.flatnonzero(text[:-2048] == words.newline) + 1

    def passage(self, rng: np.random.Generator, length: int) -> list[int]:
        """A piece of text that begins at a line's start and holds no special token."""
        start = int(rng.choice(self.starts))
        piece = self.text[start : start + length]
        w = self.words
        return [w.newline if token in (w.end, w.im_start, w.im_end) else int(token) for token in piece]

    def text_row(self, rng: np.random.Generator, length: int) -> Row:
        start = int(rng.integers(len(self.text) - length))
        return self.text[start : start + length].copy(), np.full(length, TEXT_WEIGHT, np.float32)

    def repeat_row(self, rng: np.random.Generator, length: int) -> Row:
        """A random sequence, again and again; the first pass cannot be known and counts nothing."""
        period = int(rng.integers(4, length // 2))
        base = rng.integers(3, self.words.size, period)
        weights = np.ones(length, np.float32)
        weights[: period + 1] = 0
        return np.tile(base, length // period + 1)[:length].astype(np.int64), weights

    def pairs(self, rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
        names = rng.choice(self.words.names, count, replace=False)
        values = rng.choice(self.words.values, count, replace=True)
        return [(int(n), int(v)) for n, v in zip(names, values, strict=True)]

    def document(self, rng: np.random.Generator, facts: int, length: int) -> Document:
        """`facts` fact lines in about `length` tokens; passages of text stand between some of them."""
        draft = Draft()
        pairs = self.pairs(rng, facts)
        filler = max(0, length - 3 * facts)
        gaps = rng.integers(0, facts + 1, int(rng.integers(1, max(2, facts // 2 + 1))))
        share = filler // len(gaps)
        for position in range(facts + 1):
            for _ in range(int((gaps == position).sum())):
                if share > 3:
                    draft.add(self.passage(rng, share - 1), TEXT_WEIGHT)
                    draft.add([self.words.newline], 0.0)
            if position < facts:
                draft.fact(*pairs[position], self.words.newline, PRIOR_WEIGHT)
        return Document(draft.ids, draft.weights, dict(pairs))

    def facts_row(self, rng: np.random.Generator, length: int, *, filler: bool) -> Row:
        """A document, then questions with replacement until the row is full."""
        facts = int(rng.integers(4, min(25, length // 8) + 1))
        size = 3 * facts
        if filler:
            size += int((length - size - 12) * rng.random() ** 0.5)
        document = self.document(rng, facts, size)
        draft = Draft(list(document.ids), list(document.weights))
        names = list(document.facts)
        while len(draft.ids) < length:
            name = int(rng.choice(names))
            draft.fact(name, document.facts[name], self.words.newline, 1.0)
            if filler and rng.random() < 0.08:
                draft.add([*self.passage(rng, int(rng.integers(4, 24))), self.words.newline], TEXT_WEIGHT)
        return draft.row(length)

    def turn(self, draft: Draft, role: str, ids: list[int], weight: float) -> None:
        """One chat turn in the template's form; `weight` is what the content counts."""
        w = self.words
        draft.add([w.im_start, w.roles[role], w.newline], 0.0)
        draft.add(ids, weight)
        draft.add([w.im_end], weight)
        draft.add([w.newline], 0.0)

    def chat_row(self, rng: np.random.Generator, length: int) -> Row:
        """The user's first message holds the document and ends with `Name:`; the answer is `Name: value`."""
        w = self.words
        facts = int(rng.integers(4, min(25, length // 10) + 1))
        room = max(0, length - 3 * facts - 30)
        document = self.document(rng, facts, 3 * facts + int(room * rng.random()))
        names = list(document.facts)
        draft = Draft()
        opening = list(document.ids)
        if rng.random() < 0.3:
            self.turn(draft, "system", opening, 0.0)
            opening = []
        while len(draft.ids) < length:
            name = int(rng.choice(names))
            self.turn(draft, "user", [*opening, name], 0.0)
            self.turn(draft, "assistant", [name, document.facts[name]], 1.0)
            opening = [] if rng.random() < 0.9 else [*self.passage(rng, int(rng.integers(4, 16))), w.newline]
        return draft.row(length)


@dataclass(frozen=True)
class Stage:
    """Rows of one length in one mixture, for some steps."""

    steps: int
    rows: int
    length: int
    repeat: float
    facts: float
    chat: float
    text: float
    filler: bool


CURRICULUM = (
    Stage(steps=300, rows=32, length=96, repeat=0.35, facts=0.55, chat=0.0, text=0.10, filler=False),
    Stage(steps=350, rows=12, length=256, repeat=0.10, facts=0.35, chat=0.15, text=0.40, filler=True),
    Stage(steps=650, rows=8, length=512, repeat=0.05, facts=0.35, chat=0.15, text=0.45, filler=True),
)


def draw(generator: Generator, rng: np.random.Generator, stage: Stage) -> Row:
    kind = rng.choice(4, p=[stage.repeat, stage.facts, stage.chat, stage.text])
    length = stage.length + 1
    if kind == 0:
        return generator.repeat_row(rng, length)
    if kind == 1:
        return generator.facts_row(rng, length, filler=stage.filler)
    if kind == 2:
        return generator.chat_row(rng, length)
    return generator.text_row(rng, length)


def batch(generator: Generator, seed: int, step: int, stage: Stage) -> Row:
    """The batch of one step: it depends on nothing but seed and step, so both models see the same data."""
    rng = np.random.default_rng([seed, step])
    rows = [draw(generator, rng, stage) for _ in range(stage.rows)]
    return np.stack([ids for ids, _ in rows]), np.stack([weights for _, weights in rows])
