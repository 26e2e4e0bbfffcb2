"""Which pages are converted next: a pure state machine. Time is passed in, nothing waits, nothing raises.

Bounded; one flight per (rule, page): a page that is queued or being converted is not taken again. Overload and lateness
mean that a page is dropped and counted, so the target's lookup misses and its engine computes the page itself.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field

from moonpool.c2c.config import Rule


@dataclass(frozen=True, slots=True)
class Page:
    """A page to convert: its place in the sequence and the hash of its tokens, shared by source and target."""

    index: int
    block: str


@dataclass(slots=True)
class Batch:
    """Pages of one rule, taken together so that each target layer is one GEMM over all of them."""

    rule: int
    pages: list[Page]


@dataclass(slots=True)
class ConversionQueue:
    rules: list[Rule]
    capacity: int
    counts: Counter[str] = field(default_factory=Counter)
    """queued, joined (already in flight), overload, late, first_page."""
    _waiting: list[OrderedDict[Page, float]] = field(init=False)
    _flying: set[tuple[int, Page]] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self._waiting = [OrderedDict() for _ in self.rules]

    def __len__(self) -> int:
        return sum(len(w) for w in self._waiting)

    def offer(self, rule: int, page: Page, now: float) -> bool:
        """Queue one page; False if it was not taken, with the reason counted."""
        reason = self._refusal(rule, page)
        self.counts[reason or "queued"] += 1
        if reason:
            return False
        self._waiting[rule][page] = now + self.rules[rule].deadline_s
        return True

    def _refusal(self, rule: int, page: Page) -> str:
        if page.index == 0:
            return "first_page"  # position 0 is the attention sink and stays native (c2c-design §4)
        if page in self._waiting[rule] or (rule, page) in self._flying:
            return "joined"
        return "overload" if len(self) >= self.capacity else ""

    def take(self, limit: int, now: float, ready: Container[int]) -> Batch | None:
        """Up to `limit` pages of the most urgent of the rules in `ready`, oldest first; None if none of them waits."""
        self._drop_late(now)
        oldest = [(next(iter(w.values())), r) for r, w in enumerate(self._waiting) if w and r in ready]
        if not oldest:
            return None
        rule = min(oldest)[1]
        waiting = self._waiting[rule]
        pages = [waiting.popitem(last=False)[0] for _ in range(min(limit, len(waiting)))]
        self._flying.update((rule, p) for p in pages)
        return Batch(rule, pages)

    def _drop_late(self, now: float) -> None:
        for waiting in self._waiting:
            while waiting and next(iter(waiting.values())) <= now:
                waiting.popitem(last=False)
                self.counts["late"] += 1

    def done(self, batch: Batch) -> None:
        """The batch ended, well or badly; its pages may be offered again."""
        self._flying.difference_update((batch.rule, p) for p in batch.pages)

    def idle(self) -> bool:
        return not self._flying and not len(self)
