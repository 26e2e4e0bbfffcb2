"""What a projector is taught with: documents by kind, where each is cut, and in which order they come."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from moonpool.errors import ConfigError

PAGE = 16
"""Random prefixes are whole pages of this size."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A document (`[N]` token ids). The first `prefix` tokens are mapped, the target is asked about those behind them; None: cut
    anywhere, anew each time."""

    tokens: Tensor
    prefix: int | None = None


@dataclass(frozen=True, slots=True)
class Lessons:
    """Lessons by kind (`chat`, `text`, …): those that teach, and others that judge."""

    train: Mapping[str, Sequence[Lesson]]
    held: Mapping[str, Sequence[Lesson]]

    def documents(self) -> list[Tensor]:
        return [le.tokens for part in (self.train, self.held) for kind in part.values() for le in kind]


@dataclass(frozen=True, slots=True)
class Cut:
    """A lesson as it is held: KV of `tokens[:prefix]` is mapped, `tokens[prefix:end]` are asked about."""

    tokens: Tensor
    prefix: int
    end: int

    @property
    def asked(self) -> int:
        return self.end - self.prefix


def cut(lesson: Lesson, within: tuple[int, int], continuation: int, rng: random.Random) -> Cut:
    """`within`: shortest and longest random prefix, tokens. A random prefix leaves room for the whole continuation, a given one
    takes what there is. Raises ConfigError for a document that is too short."""
    length = len(lesson.tokens)
    if lesson.prefix is not None:
        prefix = lesson.prefix
    else:
        pages = -(-within[0] // PAGE), min(within[1], length - continuation) // PAGE
        if pages[1] < pages[0]:
            need = f"{pages[0] * PAGE + continuation} tokens"
            raise ConfigError("a lesson's document is too short to be cut", need=need, have=str(length))
        prefix = PAGE * rng.randint(*pages)
    if not 0 < prefix < length:
        raise ConfigError("a lesson's prefix leaves nothing to ask about", need=f"< {length}", have=str(prefix))
    return Cut(lesson.tokens, prefix, min(length, prefix + continuation))


def schedule(
    lessons: Mapping[str, Sequence[Lesson]],
    mix: Mapping[str, float],
    batch: int,
    within: tuple[int, int],
    continuation: int,
    seed: int,
) -> Iterator[list[Cut]]:
    """One batch a step, for ever; all of it follows from the arguments, so a resumed run only skips what it has had.

    Every step mixes kinds as far as `mix` (kind → weight, 1 where it is missing) and the batch allow: its places lie evenly over
    the kinds' shares, from a random start. A kind's lessons come in a new order each time round.
    """
    rng = random.Random(seed)
    kinds = [k for k, found in lessons.items() if found and mix.get(k, 1.0) > 0]
    if not kinds:
        raise ConfigError("there are no lessons to train on")
    shares = [mix.get(k, 1.0) for k in kinds]
    decks = {k: _deck(lessons[k], rng) for k in kinds}
    while True:
        start, total, drawn = rng.random(), sum(shares), list[Cut]()
        for place in range(batch):
            kind = _at((start + place) / batch * total, kinds, shares)
            drawn.append(cut(next(decks[kind]), within, continuation, rng))
        yield drawn


def _deck(lessons: Sequence[Lesson], rng: random.Random) -> Iterator[Lesson]:
    while True:
        yield from rng.sample(lessons, len(lessons))


def _at(mark: float, kinds: Sequence[str], shares: Sequence[float]) -> str:
    """The kind in whose share the mark lies."""
    for kind, share in zip(kinds, shares, strict=True):
        mark -= share
        if mark < 0:
            return kind
    return kinds[-1]
