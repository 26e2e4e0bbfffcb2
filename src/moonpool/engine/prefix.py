"""From the pool into a sequence's cache: look up, read, copy, and plan around what was really there.

A lookup protects nothing, so a page may be gone when it is read, and a page of the wrong size is no page. Both shorten the
plan; neither is an error, because the engine can always compute. A pool that cannot be reached is an empty pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from moonpool.c2c.pages import unpack
from moonpool.engine.cache import SequenceKV
from moonpool.engine.plan import Kind, PrefixPlan, plan_prefix
from moonpool.errors import PoolError, WireError
from moonpool.keys import PageKey
from moonpool.store.base import KVPool, Match
from moonpool.types import PageShape

_PAGES_PER_READ = 128
"""Pages held open at once: an open read keeps its pages from eviction."""

Origins: TypeAlias = Callable[[bool | None], Sequence[str]]
"""Bundle digests that a request may take pages from; the argument is the request's own wish (`allow_converted`)."""


@dataclass(slots=True)
class LoadCounters:
    """Written by the loader thread only."""

    vanished: int = 0
    wrong_size: int = 0
    pool_errors: int = 0


class PrefixLoader:
    """Reads prefixes for one model. Owned by one thread."""

    def __init__(self, pool: KVPool, shape: PageShape, origins: Origins) -> None:
        self._pool, self._shape, self._origins = pool, shape, origins
        self.counters = LoadCounters()

    def lookup(self, keys: Sequence[PageKey], allow_converted: bool | None) -> list[Match | None]:
        """What would serve each page. Pages found nowhere are announced by the pool if conversion is allowed."""
        try:
            return self._pool.lookup(keys, tuple(self._origins(allow_converted)))
        except (PoolError, WireError):
            self.counters.pool_errors += 1
            return [None] * len(keys)

    def may_improve(self, matches: Sequence[Match | None], allow_converted: bool | None) -> bool:
        """Whether a conversion that is under way could still add to the prefix (page 0 and the last one stay native)."""
        return any(m is None for m in matches[1:-1]) and bool(self._origins(allow_converted))

    def load(self, kv: SequenceKV, matches: Sequence[Match | None], tokens: int, must_compute: int) -> PrefixPlan:
        """Copy the prefix's pages into `kv` (each at its own place; `kv.length` stays 0) and return the plan that they allow."""
        found = [None if m is None else Kind.CONVERTED if m.converted else Kind.NATIVE for m in matches]
        plan = plan_prefix(tokens, self._shape.tokens, found, must_compute=must_compute)
        wanted = [i for i, _ in plan.loaded_pages]
        kv.reserve(tokens)
        copied: set[int] = set()
        for at in range(0, len(wanted), _PAGES_PER_READ):
            batch = wanted[at : at + _PAGES_PER_READ]
            copied |= self._read(kv, {i: m.key for i in batch if (m := matches[i]) is not None})
            if any(i not in copied for i in batch if i > 0):
                break  # what follows a gap is of no use
        for i in wanted:
            if i not in copied:
                found[i] = None
        return plan_prefix(tokens, self._shape.tokens, found, must_compute=must_compute)

    def _read(self, kv: SequenceKV, keys: dict[int, str]) -> set[int]:
        copied: set[int] = set()
        try:
            with self._pool.open_read(list(keys.values())) as lease:
                for index, view in zip(keys, lease.views, strict=True):
                    if view is None:
                        self.counters.vanished += 1
                    elif len(view) != self._shape.nbytes:
                        self.counters.wrong_size += 1
                    else:
                        self._copy(kv, index, view)
                        copied.add(index)
        except (PoolError, WireError):
            self.counters.pool_errors += 1
        return copied

    def _copy(self, kv: SequenceKV, index: int, view: memoryview) -> None:
        """A function of its own, so that no tensor over the page's memory outlives the lease."""
        kv.write(index * self._shape.tokens, *unpack(view, self._shape))
