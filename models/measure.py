"""What the pair can do: recall with the right, a wrong and no document, recall in chats, and loss on text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from models.corpus import IntArray, Words
from models.tasks import Document, Generator
from torch import Tensor

LENGTHS = (64, 128, 256, 480)
MIN_RECALL = 0.95
MAX_CHANCE = 0.10


@dataclass(frozen=True)
class Recall:
    """Share of right answers over `asked` questions for one document length."""

    length: int
    asked: int
    right: float
    wrong: float
    none: float
    later: float
    chat: float


def _last(model: Any, rows: list[list[int]]) -> list[int]:
    """The likeliest next token after every row; all rows have one length."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor(rows), use_cache=False, logits_to_keep=1).logits
    return [int(token) for token in logits[:, -1].argmax(-1)]


def _score(model: Any, rows: list[list[int]], answers: list[int]) -> list[bool]:
    return [got == want for got, want in zip(_last(model, rows), answers, strict=True)]


def _answered(document: Document, order: list[int], newline: int) -> list[int]:
    return [token for name in order for token in (name, document.facts[name], newline)]


def _chat(words: Words, document: Document, name: int) -> list[int]:
    """The chat prompt and the answer's first token, which repeats the name that was asked."""
    w = words
    user = [w.im_start, w.roles["user"], w.newline, *document.ids, name, w.im_end, w.newline]
    return [*user, w.im_start, w.roles["assistant"], w.newline]


def _chat_right(model: Any, words: Words, document: Document, names: list[int]) -> list[bool]:
    """Two free greedy steps: the name, then its value."""
    rows = [_chat(words, document, name) for name in names]
    first = _last(model, rows)
    second = _last(model, [[*row, token] for row, token in zip(rows, first, strict=True)])
    return [a == n and b == document.facts[n] for a, b, n in zip(first, second, names, strict=True)]


def recall(model: Any, generator: Generator, length: int, documents: int, seed: int, asked: int = 6) -> Recall:
    """Questions about held-out documents of 8 to 24 facts, each asked alone; `later` asks after 8 answered ones."""
    rng = np.random.default_rng([seed, length])
    words = generator.words
    found: dict[str, list[bool]] = {"right": [], "wrong": [], "none": [], "later": [], "chat": []}
    for _ in range(documents):
        facts = int(rng.integers(8, min(24, length // 4) + 1))
        document = generator.document(rng, facts, length)
        other = _retold(document, rng, words)
        names = [int(n) for n in rng.choice(list(document.facts), asked, replace=False)]
        answers = [document.facts[name] for name in names]
        done = _answered(document, [int(n) for n in rng.choice(list(document.facts), 8)], words.newline)
        found["right"] += _score(model, [[*document.ids, name] for name in names], answers)
        found["wrong"] += _score(model, [[*other, name] for name in names], answers)
        found["none"] += _score(model, [[words.newline, name] for name in names], answers)
        unseen = [name for name in document.facts if name not in done] or names
        found["later"] += _score(
            model,
            [[*document.ids, *done, name] for name in unseen[:asked]],
            [document.facts[n] for n in unseen[:asked]],
        )
        found["chat"] += _chat_right(model, words, document, names)
    shares = {key: float(np.mean(values)) for key, values in found.items()}
    return Recall(length=length, asked=len(found["right"]), **shares)


def _retold(document: Document, rng: np.random.Generator, words: Words) -> list[int]:
    """The same document with every fact's value drawn anew."""
    ids = list(document.ids)
    for i, token in enumerate(ids[:-1]):
        if token in document.facts and ids[i + 1] == document.facts[token]:
            ids[i + 1] = int(rng.choice(words.values))
    return ids


def text_loss(model: Any, text: IntArray, length: int = 512, rows: int = 48) -> float:
    """Nats per token over the first rows of held-out text."""
    count = min(rows, len(text) // length)
    losses = []
    for start in range(0, count, 8):
        ids = torch.from_numpy(text[start * length : min(start + 8, count) * length].reshape(-1, length))
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item())
    return float(np.mean(losses))
