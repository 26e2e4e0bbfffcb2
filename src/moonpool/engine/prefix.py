"""From the pool into a sequence's cache: look up, read, copy, and plan around what was really there.

A lookup protects nothing, so a page may be gone when it is read, and a page of the wrong size is no page. Both shorten the
plan; neither is an error, because the engine can always compute. A pool that cannot be reached is an empty pool.

A page is had in the first of these ways that there is: native; another model's that is the same (`engine.alias`); converted
ahead; converted now from the source's page (`engine.onload`). The last two only where the cost model does not object (`engine.pays`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from moonpool.c2c.pages import unpack
from moonpool.clock import Clock, SystemClock
from moonpool.engine.alias import Aliases
from moonpool.engine.cache import SequenceKV
from moonpool.engine.onload import OnLoad, SourcePage
from moonpool.engine.pays import Offer, Payoff
from moonpool.engine.plan import Kind, PrefixPlan, plan_prefix
from moonpool.errors import PoolError, WireError
from moonpool.keys import PageKey
from moonpool.store.base import KVPool, Match
from moonpool.types import PageShape

_PAGES_PER_READ = 128
"""Pages held open at once: an open read keeps its pages from eviction."""

Origins: TypeAlias = Callable[[bool | None], Sequence[str]]
"""Bundle digests that a request may take pages from; the argument is the request's own wish (`allow_converted`)."""

Found: TypeAlias = Match | SourcePage
"""What would serve one page."""


@dataclass(slots=True)
class LoadCounters:
    """Written by the loader thread only."""

    vanished: int = 0
    wrong_size: int = 0
    pool_errors: int = 0
    decisions: Counter[str] = field(default_factory=Counter)
    """The cost model's, by reason: one for each request that it was asked about."""
    on_load: Counter[str] = field(default_factory=Counter)
    """Pages converted on load, and those that were not, by reason."""


class PrefixLoader:
    """Reads prefixes for one model. Owned by one thread."""

    def __init__(
        self,
        pool: KVPool,
        shape: PageShape,
        origins: Origins,
        *,
        aliases: Aliases | None = None,
        on_load: OnLoad | None = None,
        payoff: Payoff | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._pool, self._shape, self._origins = pool, shape, origins
        self._aliases = aliases
        self._on_load, self._payoff, self._clock = on_load, payoff, clock or SystemClock()
        self.counters = LoadCounters(on_load=on_load.counts if on_load else Counter())

    def lookup(
        self, keys: Sequence[PageKey], allow_converted: bool | None, tokens: Sequence[int] = ()
    ) -> list[Found | None]:
        """What would serve each page; `tokens` is the prompt, on which it depends how far an alias reaches. Pages found nowhere
        are announced by the pool if conversion is allowed."""
        origins = tuple(self._origins(allow_converted))
        found: list[Found | None] = [None] * len(keys)
        try:
            if self._aliases:
                for i, same in self._aliases.find(keys, tokens).items():
                    found[i] = same
            left = [i for i, m in enumerate(found) if m is None]
            for i, match in zip(left, self._pool.lookup([keys[i] for i in left], origins) if left else [], strict=True):
                found[i] = match
            missing = [i for i, m in enumerate(found) if m is None]
            if self._on_load and missing and origins:
                for i, page in self._on_load.find(keys, missing, origins).items():
                    found[i] = page
        except (PoolError, WireError):
            self.counters.pool_errors += 1
        return found

    def may_improve(self, matches: Sequence[Found | None], allow_converted: bool | None) -> bool:
        """Whether a conversion that is under way could still add to the prefix (page 0 and the last one stay native)."""
        return any(m is None for m in matches[1:-1]) and bool(self._origins(allow_converted))

    def load(self, kv: SequenceKV, matches: Sequence[Found | None], tokens: int, must_compute: int) -> PrefixPlan:
        """Copy the prefix's pages into `kv` (each at its own place; `kv.length` stays 0) and return the plan that they allow."""
        started = self._clock.now()
        found = [_kind(m) for m in matches]
        plan, found = self._worthwhile(matches, found, tokens, must_compute)
        wanted = [i for i, _ in plan.loaded_pages]
        kv.reserve(tokens)
        copied: set[int] = set()
        for at in range(0, len(wanted), _PAGES_PER_READ):
            batch = wanted[at : at + _PAGES_PER_READ]
            copied |= self._read(kv, {i: m for i in batch if (m := matches[i]) is not None}, started)
            if any(i not in copied for i in batch if i > 0):
                break  # what follows a gap is of no use
        for i in wanted:
            if i not in copied:
                found[i] = None
        final = plan_prefix(tokens, self._shape.tokens, found, must_compute=must_compute)
        shared = sum(self._aliases is not None and self._aliases.shared(matches[i]) for i, _ in final.loaded_pages)
        offers = [o for i, kind in final.loaded_pages if kind is Kind.CONVERTED and (o := _offer(matches[i]))]
        bundles = tuple(dict.fromkeys(o.bundle for o in offers))
        return replace(final, declined=plan.declined, shared=shared * self._shape.tokens, bundles=bundles)

    def _worthwhile(
        self, matches: Sequence[Found | None], found: list[Kind | None], tokens: int, must_compute: int
    ) -> tuple[PrefixPlan, list[Kind | None]]:
        """The longest plan that pays, and what it is made of: with every page that can be had, else without those that
        would be converted now, else with native ones only. The decision that is counted is the last one."""
        full = plan = plan_prefix(tokens, self._shape.tokens, found, must_compute=must_compute)
        if self._payoff is None or not full.count(Kind.CONVERTED):
            return full, found
        offers = [_offer(m) for m in matches]
        without_now = [None if isinstance(m, SourcePage) else k for m, k in zip(matches, found, strict=True)]
        decision = None
        for kinds in dict.fromkeys((tuple(found), tuple(without_now))):
            found = list(kinds)
            plan = plan_prefix(tokens, self._shape.tokens, found, must_compute=must_compute)
            judged = self._payoff.judge(plan, offers)
            decision = judged or decision
            if judged is None or judged.pays:
                break
        else:
            found = [k if k is Kind.NATIVE else None for k in found]
            plan = plan_prefix(tokens, self._shape.tokens, found, must_compute=must_compute)
        if decision is not None:
            self.counters.decisions[decision.reason] += 1
        return replace(plan, declined=plan.computed_tokens - full.computed_tokens), found

    def _read(self, kv: SequenceKV, pages: dict[int, Found], started: float) -> set[int]:
        copied: set[int] = set()
        now = {i: p for i, p in pages.items() if isinstance(p, SourcePage)}
        try:
            copied |= self._read_stored(kv, {i: m.key for i, m in pages.items() if not isinstance(m, SourcePage)})
            if now and self._on_load:
                copied |= self._on_load.read(now, started, lambda i, k, v: kv.write(i * self._shape.tokens, k, v))
        except (PoolError, WireError):
            self.counters.pool_errors += 1
        return copied

    def _read_stored(self, kv: SequenceKV, keys: dict[int, str]) -> set[int]:
        copied: set[int] = set()
        if not keys:
            return copied
        with self._pool.open_read(list(keys.values())) as lease:
            for index, view in zip(keys, lease.views, strict=True):
                if view is None:
                    self.counters.vanished += 1
                elif len(view) != self._shape.nbytes:
                    self.counters.wrong_size += 1
                else:
                    self._copy(kv, index, view)
                    copied.add(index)
        return copied

    def _copy(self, kv: SequenceKV, index: int, view: memoryview) -> None:
        """A function of its own, so that no tensor over the page's memory outlives the lease."""
        kv.write(index * self._shape.tokens, *unpack(view, self._shape))


def _kind(match: Found | None) -> Kind | None:
    if match is None:
        return None
    return Kind.CONVERTED if isinstance(match, SourcePage) or match.converted else Kind.NATIVE


def _offer(match: Found | None) -> Offer | None:
    if isinstance(match, SourcePage):
        return Offer(match.rule.digest, on_load=True)
    key = PageKey.parse(match.key) if match is not None and match.converted else None
    return Offer(key.origin, on_load=False) if key else None
