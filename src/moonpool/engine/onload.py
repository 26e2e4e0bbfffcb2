"""Convert on load: the target's engine reads the *source's* pages and converts them in its own load step.

    lookup   pages that the target has nowhere ─► are they there as the source's? ─► part of the plan, as converted ones
    load     open_read(source pages) ─► Conversion.run ─► the sequence's cache (─► the pool, if the rule says so)

It runs on the engine's loader thread, like all loading, so answers under way go on. Whatever goes wrong (a bundle that is not
loaded, a page that is gone or refused, a fault, the rule's deadline) makes these pages misses, which the engine computes.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from moonpool.c2c.config import Rule
from moonpool.c2c.convert import Conversion
from moonpool.c2c.gate import GateRefused
from moonpool.c2c.loading import status_of
from moonpool.c2c.pages import unpack
from moonpool.clock import Clock
from moonpool.errors import MoonpoolError
from moonpool.keys import PageKey
from moonpool.store.base import KVPool
from moonpool.types import RuleStatus

log = logging.getLogger(__name__)

LoadRule: TypeAlias = Callable[[Rule], Conversion]
"""Makes a rule's conversion. Raises MoonpoolError where the rule must not be served."""

Write: TypeAlias = Callable[[int, Tensor, Tensor], None]
"""Takes (page index, k, v), each `[tokens, layers, heads, dim]`."""


@dataclass(frozen=True, slots=True)
class SourcePage:
    """What would serve one page of the target: this page of the source, by this rule."""

    rule: Rule
    target: PageKey

    @property
    def source(self) -> PageKey:
        return self.target.of(self.rule.source.owner)


class OnLoad:
    """The `on_load` rules of one target. `find` and `read` are for one thread; `close` ends the thread that loads bundles."""

    def __init__(
        self, pool: KVPool, rules: Sequence[Rule], load: LoadRule, clock: Clock, *, batch_pages: int = 64
    ) -> None:
        self._pool, self._clock, self._batch = pool, clock, batch_pages
        self._load_rule = load
        self._rules = [r for r in rules if r.mode == "on_load"]
        self._ready: dict[str, Conversion] = {}
        self._settled = threading.Event()
        self.refusals: dict[str, str] = {}
        """Rule name → why it is not served."""
        self._gated: set[str] = set()  # of these: by the gate
        self.counts = Counter[str]()
        """Pages: `converted`, and those that were not, by reason."""
        self._thread = threading.Thread(target=self._load_all, name="moonpool-onload", daemon=True)
        self._stopping = False

    def start(self) -> OnLoad:
        """Load the bundles in the background; until one is there, its rule serves nothing."""
        self._thread.start()
        return self

    def wait_ready(self, timeout: float) -> bool:
        """Wait until every bundle is loaded or refused."""
        return self._settled.wait(timeout)

    def close(self, timeout: float) -> None:
        self._stopping = True
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _load_all(self) -> None:
        for rule in self._rules:
            if self._stopping:
                break
            try:
                self._ready[rule.digest] = self._load_rule(rule)
            except MoonpoolError as e:
                self._gated |= {rule.name} if isinstance(e, GateRefused) else set()
                self.refusals[rule.name] = str(e)
                log.warning("rule %s is not served: %s", rule.name, e)
            except Exception as e:  # process edge: an unforeseen fault refuses this rule and leaves the others serving
                self.refusals[rule.name] = f"internal error: {e!r}"
                log.exception("rule %s could not be loaded", rule.name)
        self._settled.set()

    def status(self, rule: Rule) -> RuleStatus | None:
        """What this engine has to say of a rule of its own; None for one of another mode."""
        if rule not in self._rules:
            return None
        refusal = self.refusals.get(rule.name, "")
        return status_of(rule, self._ready.get(rule.digest), refusal, by_gate=rule.name in self._gated)

    # -- the loader's thread

    def find(self, keys: Sequence[PageKey], missing: Sequence[int], allowed: Collection[str]) -> dict[int, SourcePage]:
        """Of the `missing` pages those that the source has, by index; the first rule in the config's order wins. Only rules
        whose digest is in `allowed`, and keys of the rule's own target: a salted prefix is nobody else's.

        Raises PoolError, WireError.
        """
        found: dict[int, SourcePage] = {}
        for rule in self._rules:
            wanted = [i for i in missing if i not in found and keys[i].owner == rule.target.owner]
            if not wanted or rule.digest not in self._ready or rule.digest not in allowed:
                continue
            matches = self._pool.lookup([keys[i].of(rule.source.owner) for i in wanted])
            found |= {i: SourcePage(rule, keys[i]) for i, m in zip(wanted, matches, strict=True) if m is not None}
        return found

    def read(self, pages: dict[int, SourcePage], started: float, write: Write) -> set[int]:
        """Convert these pages, in the order given, and write them; returns the indices written. It stops at the first batch
        that begins `deadline_s` after `started`, or has a page that failed: what follows a gap is of no use.

        Raises PoolError, WireError.
        """
        done: set[int] = set()
        for rule in {p.rule.digest: p.rule for p in pages.values()}.values():
            mine = {i: p for i, p in pages.items() if p.rule.digest == rule.digest}
            for at in range(0, len(mine), self._batch):
                batch = dict(list(mine.items())[at : at + self._batch])
                if self._clock.now() - started >= rule.deadline_s:
                    self.counts["late"] += len(mine) - at
                    break
                made = self._convert_safely(rule, batch, write)
                done |= made
                if len(made) < len(batch):
                    break
        return done

    def _convert_safely(self, rule: Rule, batch: dict[int, SourcePage], write: Write) -> set[int]:
        try:
            return self._convert(rule, self._ready[rule.digest], batch, write)
        except MoonpoolError:
            raise
        except Exception:  # process edge: a projector's fault must not fail a request that can be computed
            log.exception("conversion on load failed (%s)", rule.name)
            self.counts["internal"] += len(batch)
            return set()

    def _convert(self, rule: Rule, conversion: Conversion, batch: dict[int, SourcePage], write: Write) -> set[int]:
        with self._pool.open_read([p.source.text for p in batch.values()]) as lease:
            there = [(i, v) for i, v in zip(batch, lease.views, strict=True) if v is not None]
            self.counts["source_missing"] += len(batch) - len(there)
            outs = [memoryview(bytearray(conversion.target_bytes)) for _ in there]
            errors = conversion.run([v for _, v in there], [i for i, _ in there], outs)
        self.counts.update(type(e).__name__ for e in errors if e is not None)
        good = [(i, out) for (i, _), out, e in zip(there, outs, errors, strict=True) if e is None]
        for i, out in good:
            write(i, *unpack(out, conversion.target_shape))
        self.counts["converted"] += len(good)
        if rule.store_loaded and good:
            self._store(rule, {batch[i].target.converted(rule.digest).text: out for i, out in good})
        return {i for i, _ in good}

    def _store(self, rule: Rule, pages: dict[str, memoryview]) -> None:
        """Best effort: the request has its pages already."""
        try:
            outcomes = self._pool.batch_put(list(pages), list(pages.values()))
        except MoonpoolError as e:
            log.info("rule %s: converted pages were not stored: %s", rule.name, e)
            self.counts["not_stored"] += len(pages)
            return
        self.counts["not_stored"] += sum(isinstance(o, MoonpoolError) for o in outcomes)
