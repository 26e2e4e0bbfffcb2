"""Questions whose answers stand only in the context: does a cache carry facts, or just the mood of a text?

A document is ordinary sentences with facts between them, in one of several forms (`facts_forms`): lines `Name: value`, a question
`\\nName:` and its answer ` value`, say. Values are drawn at random, so nothing that a model learned helps, and questions are drawn
with replacement, so that elimination does not help either. Every document has a *twin*: the same sentences and names with other
values. Serving the twin's cache must give the twin's answers, i.e. none of the document's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moonpool.c2c.fitting.facts_forms import LINES, Form
from moonpool.c2c.fitting.facts_words import NAMES, VALUES
from moonpool.errors import ConfigError

SENTENCES = (
    "The list below was kept by hand for years.",
    "Nobody remembers why the order is what it is.",
    "Some of the entries were written twice and then crossed out.",
    "A clerk copied the rest of the page on the next day.",
    "The weather had been fair for most of the week.",
    "It is said that the office closed early on Fridays.",
    "The margin holds a note about the price of paper.",
    "Later readers have added nothing of importance.",
)
"""Filler where the caller has no text of the models' own domain."""


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Question:
    """`prompt` continues the document; `answer` are the tokens of the right value, `wrong` those of the twin's; `end` follows an
    answer where the form of the facts ends it with a sign."""

    prompt: Tensor
    answer: Tensor
    wrong: Tensor
    end: Tensor = field(default_factory=_nothing)


@dataclass(frozen=True, slots=True)
class FactDocument:
    """`tokens` and `twin` have the asked length exactly; no fact lies in the first `margin` tokens."""

    tokens: Tensor
    twin: Tensor
    questions: list[Question]
    facts: int
    """Facts in the document: a guess among its values is right with chance 1 / facts."""

    def told(self) -> Tensor:
        """The document, then its questions with their answers: what a fit reads."""
        return torch.cat([self.tokens, *(t for q in self.questions for t in (q.prompt, q.answer, q.end))])


class FactWriter:
    """Writes fact documents of one form with one tokenizer (transformers' or anything with `encode(text, add_special_tokens=)`)."""

    def __init__(
        self, tokenizer: Any, *, sentences: Sequence[str] = SENTENCES, seed: int = 0, form: Form = LINES
    ) -> None:
        self._tokenizer, self._form, self._rng = tokenizer, form, random.Random(seed)
        self._sentences = [form.between(s) for s in sentences]

    def document(self, length: int, *, facts: int = 12, questions: int = 8, margin: int = 16) -> FactDocument:
        """One document. Its first `margin` tokens hold no fact, so that a native first page answers nothing, and neither do its
        last tokens, so that it may be cut anywhere in them. Raises ConfigError if that many facts do not fit."""
        names = self._rng.sample(NAMES, facts)
        mine, other = self._rng.sample(VALUES, facts), self._rng.sample(VALUES, facts)
        other = [
            o if o != m else next(v for v in VALUES if v not in (m, *other)) for m, o in zip(mine, other, strict=True)
        ]
        plan = self._plan(length - margin, names, (mine, other), margin)
        while self._size(plan, names, (mine, other)) < length + margin:
            plan.append(self._rng.choice(self._sentences))
        tokens, twin = (self._encode(self._text(plan, names, values))[:length] for values in (mine, other))
        asked = [self._rng.randrange(facts) for _ in range(questions)]
        return FactDocument(tokens, twin, [self._question(names[i], mine[i], other[i]) for i in asked], facts)

    def _plan(self, length: int, names: list[str], values: tuple[list[str], list[str]], margin: int) -> list[str | int]:
        """Sentences (text) and facts (indices) in order, as many sentences as fit, at seeded places."""
        lead: list[str | int] = []
        while not lead or self._size(lead, names, values) < margin:
            lead.append(self._rng.choice(self._sentences))
        plan = [*lead, *range(len(names))]
        if self._size(plan, names, values) > length:
            raise ConfigError("the facts do not fit", need=f"{len(names)} lines", have=f"{length} tokens")
        while True:
            longer = list(plan)
            longer.insert(self._rng.randint(len(lead), len(plan)), self._rng.choice(self._sentences))
            if self._size(longer, names, values) > length:
                return plan
            plan = longer

    def _size(self, plan: list[str | int], names: list[str], values: tuple[list[str], list[str]]) -> int:
        """Tokens of the longer of document and twin."""
        return max(len(self._encode(self._text(plan, names, v))) for v in values)

    def _question(self, name: str, value: str, wrong: str) -> Question:
        f = self._form
        return Question(*(self._encode(t) for t in (f.ask(name), f.say(value), f.say(wrong), f.end)))

    def _text(self, plan: list[str | int], names: list[str], values: list[str]) -> str:
        return "\n".join(p if isinstance(p, str) else self._form.tell(names[p], values[p]) for p in plan)

    def _encode(self, text: str) -> Tensor:
        return torch.tensor(self._tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)


def is_exact(logits: Tensor, question: Question, decode: Callable[[int], str]) -> bool:
    """Whether greedy decoding answers with the value as its first word.

    `logits`: `[len(prompt) + len(answer), vocab]` of prompt and right answer. Greedy decoding gives the value exactly if each of its
    tokens is the most likely one after those before it, and the word ends there.
    """
    said = logits[len(question.prompt) - 1 :].argmax(-1)
    if not torch.equal(said[:-1], question.answer):
        return False
    return not decode(int(said[-1]))[:1].isalpha()


def answer_nll(logits: Tensor, question: Question) -> Tensor:
    """Negative log-likelihood of each token of the right answer; `logits` as for `is_exact`."""
    said = logits[len(question.prompt) - 1 : -1].log_softmax(-1)
    return -said.gather(1, question.answer[:, None])[:, 0]
