"""Which part of a prompt is loaded from the pool and which is computed. Pure: no pool, no tensors.

    page     0         1 … m        m+1 …        last
           native    converted     nothing     (never loaded: something must be computed)
    steps  Load      Load          Compute ─────────────►

Rules, normative (design.md, "Cross-model conversion"):

* The plan follows the longest prefix that the pool has and stops at the first page that has nothing.
* Page 0 is never taken converted. If it is not there natively it is computed, and the plan goes on behind it: position 0 is
  the attention sink, and an error there spoils every later token.
* The last full page of the prompt is never taken converted: what the answer leans on most stays exact.
* At least the last prompt token is computed, or there would be no logits to continue from (field-bugs N6).
* Where the cost model has a say, converted pages are taken only if that is faster than computing them (`engine.pays`).
* What is computed behind a converted page is *tainted*: it attends to approximations, so it must never be stored as native.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class Kind(Enum):
    """What the pool has for one page."""

    NATIVE = "native"
    CONVERTED = "converted"


@dataclass(frozen=True, slots=True)
class Compute:
    """Run the model over tokens `[start, end)`."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Load:
    """Take pages `[first, end)` from the pool, all of one kind."""

    first: int
    end: int
    kind: Kind


Step: TypeAlias = Compute | Load


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """Steps that cover the prompt's tokens `[0, tokens)` in order, without gap or overlap; the last one is a Compute."""

    tokens: int
    page_size: int
    steps: tuple[Step, ...]
    declined: int = 0
    """Tokens of pages that could have been had by conversion, and are computed because that is faster (`engine.pays`)."""
    shared: int = 0
    """Tokens of native pages that were read from another model of the same KV (`engine.alias`)."""
    bundles: tuple[str, ...] = ()
    """Digests of the bundles that made the converted pages, each once."""

    @property
    def loaded_pages(self) -> list[tuple[int, Kind]]:
        """(page index, kind) of every page to read, ascending."""
        return [(i, s.kind) for s in self.steps if isinstance(s, Load) for i in range(s.first, s.end)]

    def count(self, kind: Kind) -> int:
        """Prompt tokens that come from pages of this kind."""
        return self.page_size * sum(k is kind for _, k in self.loaded_pages)

    @property
    def computed_tokens(self) -> int:
        return sum(s.end - s.start for s in self.steps if isinstance(s, Compute))

    @property
    def tainted_from(self) -> int | None:
        """First token position of a converted page; what is computed from there on is not native. None: nothing is tainted."""
        return next((i * self.page_size for i, kind in self.loaded_pages if kind is Kind.CONVERTED), None)

    def storable(self, length: int) -> list[int]:
        """Pages that this request computed natively, once `length` tokens of KV exist (the answer's tokens count too)."""
        loaded = {i for i, _ in self.loaded_pages}
        end = length if self.tainted_from is None else min(length, self.tainted_from)
        return [i for i in range(end // self.page_size) if i not in loaded]


def plan_prefix(tokens: int, page_size: int, found: Sequence[Kind | None], *, must_compute: int = 1) -> PrefixPlan:
    """The plan for a prompt of `tokens` tokens whose i-th full page is in the pool as `found[i]`.

    `found` may be shorter than the prompt has pages. `must_compute` (>= 1) trailing tokens are computed in any case, because
    their logits are wanted. Raises ValueError for an empty prompt.
    """
    if tokens < 1 or page_size < 1 or must_compute < 1:
        raise ValueError("tokens, page_size and must_compute are at least 1")
    loadable = min(len(found), max(0, tokens - must_compute) // page_size)
    last_full = tokens // page_size - 1
    kinds: list[Kind | None] = []
    for i in range(loadable):
        kind = found[i]
        if kind is Kind.CONVERTED and i in (0, last_full):
            kind = None
        if kind is None and i > 0:
            break
        kinds.append(kind)
    if kinds == [None]:  # page 0 alone was computed apart, for nothing behind it
        kinds = []
    return PrefixPlan(tokens, page_size, _steps(tokens, page_size, kinds))


def _steps(tokens: int, page_size: int, kinds: Sequence[Kind | None]) -> tuple[Step, ...]:
    steps: list[Step] = []
    for i, kind in enumerate(kinds):
        last = steps[-1] if steps else None
        if kind is None:
            steps.append(Compute(i * page_size, (i + 1) * page_size))
        elif isinstance(last, Load) and last.kind is kind:
            steps[-1] = Load(last.first, i + 1, kind)
        else:
            steps.append(Load(i, i + 1, kind))
    steps.append(Compute(len(kinds) * page_size, tokens))
    return tuple(steps)
