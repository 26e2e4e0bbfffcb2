"""The converter: watches the pool, runs projectors, puts converted pages back. It sees only `KVPool`.

    put of a source page ─► Stored ─┐
    lookup of a target   ─► Missed ─┼─► rule? ─► ConversionQueue ─► worker: open_read → Conversion.run → reserve/commit
    someone's hint       ─► Hinted ─┘            (bounded)                  zero-copy on both sides

Nothing here runs on a putter's thread and nothing makes a putter or a reader wait: the pool hands over events, and what
cannot be converted in time is simply not there. The same object serves a thread in embedded mode and a process of its own.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch
from msgspec.structs import replace

from moonpool.c2c.calibration import RuleCosts
from moonpool.c2c.config import C2CConfig, Rule
from moonpool.c2c.convert import Conversion
from moonpool.c2c.download import Progress
from moonpool.c2c.gate import GateRefused
from moonpool.c2c.loading import load_conversion, status_of
from moonpool.c2c.queue import Batch, ConversionQueue, Page
from moonpool.c2c.standing import RuleDesk
from moonpool.clock import Clock, SystemClock
from moonpool.errors import ConnectionLost, MoonpoolError, PoolClosed
from moonpool.keys import PageKey
from moonpool.store.base import EventStream, KVPool, Reservation
from moonpool.types import Hinted, Missed, PoolEvent, Put, RuleStatus, Stored

log = logging.getLogger(__name__)

_WAIT_S = 0.2
"""How long a thread waits before it looks again whether it should stop."""
_EVENTS_AT_ONCE = 1024


class ConverterStats(msgspec.Struct, frozen=True, kw_only=True):
    converted_pages: int
    converted_tokens: int
    seconds: float
    """Time inside `Conversion.run`, all workers together."""
    waiting_pages: int
    rejected: dict[str, int]
    """Pages that were not converted, by reason."""
    rules: list[RuleStatus]


@dataclass(slots=True)
class _LoadedRule:
    rule: Rule
    conversion: Conversion | None = None
    refusal: str = ""
    refused_by_gate: bool = False
    progress: str = ""
    pages: int = 0

    def note(self, file: str, done: int, total: int) -> None:
        self.progress = f"{file}: {done >> 20} of {total >> 20} MiB"

    def status(self) -> RuleStatus:
        status = status_of(self.rule, self.conversion, self.refusal, by_gate=self.refused_by_gate)
        return replace(status, reason=status.reason or self.progress, pages=self.pages)


@dataclass(slots=True)
class _Totals:
    pages: int = 0
    seconds: float = 0.0
    rejected: Counter[str] = field(default_factory=Counter)


LoadConversion: TypeAlias = Callable[[Rule, Progress], Conversion]


class Converter:
    """Runs the rules of `config` over `pool` until `close`. Owns its threads; borrows the pool."""

    def __init__(
        self,
        pool: KVPool,
        config: C2CConfig,
        *,
        clock: Clock | None = None,
        load: LoadConversion | None = None,
        cache_dir: Path | None = None,
        costs: RuleCosts | None = None,
    ) -> None:
        """`load` makes a rule's conversion (default: fetch, verify and check its bundle); it runs on a thread of its own.
        `costs` says which pages are worth making (default: as this machine's calibrations have it)."""
        self._pool, self._config, self._clock = pool, config, clock or SystemClock()
        self._load_conversion = load or (lambda rule, progress: load_conversion(rule, config, cache_dir, progress))
        self._costs = costs or RuleCosts.of(config.rules, config.page_size, cache_dir)
        self._loaded = [_LoadedRule(r) for r in config.rules]
        self._queue = ConversionQueue(config.rules, config.queue_pages)
        self._totals = _Totals()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._events: EventStream | None = None
        self._by_source = _index(config.rules, lambda r: r.source.owner)
        self._by_target = _index(config.rules, lambda r: r.target.owner)
        self._desk = RuleDesk(pool, "converter", self._clock)
        self._threads = [threading.Thread(target=self._watch, name="c2c-events", daemon=True)]
        self._threads += [
            threading.Thread(target=self._load, args=(r,), name=f"c2c-load-{r}", daemon=True)
            for r in range(len(self._loaded))
        ]
        self._threads += [
            threading.Thread(target=self._work, name=f"c2c-worker-{w}", daemon=True) for w in range(config.workers)
        ]

    def start(self) -> Converter:
        """Subscribe first, so that no put after this call goes unseen, then load bundles in the background."""
        if self._config.rules:
            self._events = self._subscribe()
            for thread in self._threads:
                thread.start()
        return self

    def close(self) -> None:
        """Stop taking work and end all threads; pages half made are revoked. Idempotent."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        if self._events:
            self._events.close()
            self._events = None

    def stats(self) -> ConverterStats:
        with self._changed:
            rejected = self._totals.rejected + self._queue.counts
            rejected.pop("queued", None)
            return ConverterStats(
                converted_pages=self._totals.pages,
                converted_tokens=self._totals.pages * self._config.page_size,
                seconds=self._totals.seconds,
                waiting_pages=len(self._queue),
                rejected=dict(rejected),
                rules=self._statuses(),
            )

    def wait_ready(self, timeout: float) -> list[RuleStatus]:
        """Wait until every bundle is loaded or refused, at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: all(r.conversion or r.refusal for r in self._loaded), timeout)
            return self._statuses()

    def _statuses(self) -> list[RuleStatus]:
        """Called under the lock."""
        return [self._desk.seen(r.status()) for r in self._loaded]

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing is queued or in work; False on timeout. Events still under way in the pool do not count."""
        with self._changed:
            return self._changed.wait_for(self._queue.idle, timeout)

    # -- loading

    def _load(self, index: int) -> None:
        loaded = self._loaded[index]
        rule = loaded.rule
        try:
            conversion = self._load_conversion(rule, loaded.note)
        except MoonpoolError as e:
            self._settle(loaded, refusal=str(e), by_gate=isinstance(e, GateRefused))
            log.warning("rule %s refused: %s", rule.name, e)
        except Exception as e:  # process edge: an unforeseen fault refuses this rule and leaves the others serving
            self._settle(loaded, refusal=f"internal error: {e!r}")
            log.exception("rule %s could not be loaded", rule.name)
        else:
            self._settle(loaded, conversion=conversion)

    def _settle(
        self, loaded: _LoadedRule, conversion: Conversion | None = None, refusal: str = "", *, by_gate: bool = False
    ) -> None:
        if conversion and conversion.verdict and not conversion.verdict.passed:
            log.warning("rule %s is served by force: %s", loaded.rule.name, conversion.verdict.text)
        with self._changed:
            loaded.conversion, loaded.refusal, loaded.progress = conversion, refusal, ""
            loaded.refused_by_gate = by_gate
            told = [r.status() for r in self._loaded]
        self._desk.tell(
            told
        )  # before anybody hears that it is ready: engines take no page of a rule that they do not know
        with self._changed:
            self._changed.notify_all()

    def _tell(self) -> None:
        if self._desk.due():
            with self._changed:
                told = [r.status() for r in self._loaded]
            self._desk.tell(told)

    # -- events

    def _subscribe(self) -> EventStream:
        return self._pool.subscribe(sorted(self._by_source.keys() | self._by_target.keys()), self._config.queue_pages)

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self._tell()
            try:
                if self._events is None:
                    self._events = self._subscribe()
                events = self._events.next(_EVENTS_AT_ONCE, _WAIT_S)
            except PoolClosed:
                return
            except ConnectionLost:  # the messenger went away: subscribe again when it is back
                if self._events:
                    self._events.close()
                    self._events = None
                self._stopping.wait(_WAIT_S)
                continue
            if events:
                self._accept(events)

    def _accept(self, events: list[PoolEvent]) -> None:
        now = self._clock.now()
        with self._changed:
            for event in events:
                key = PageKey.parse(event.key)
                if key is None or key.origin:
                    continue
                for rule in self._wanting(event, key.owner):
                    if self._loaded[rule].refusal:
                        self._totals.rejected["rule_refused"] += 1
                    elif self._config.rules[rule].digest in self._desk.disabled:
                        self._totals.rejected["rule_disabled"] += 1
                    elif not isinstance(event, Hinted) and (why := self._costs.refusal(rule, key.index)):
                        self._totals.rejected[why] += 1
                    else:
                        self._queue.offer(rule, Page(key.index, key.block), now)
            self._changed.notify_all()

    def _wanting(self, event: PoolEvent, owner: str) -> list[int]:
        """Rules that this event sets off. Those of mode `on_load` are the engines' own work."""
        match event:
            case Stored():
                return [r for r in self._by_source.get(owner, []) if self._config.rules[r].mode == "on_put"]
            case Missed():
                return [
                    r for r in self._by_target.get(owner, []) if self._config.rules[r].mode in ("on_put", "on_miss")
                ]
            case Hinted():
                return [r for r in self._by_target.get(owner, []) if self._config.rules[r].mode != "on_load"]

    # -- conversion

    def _work(self) -> None:
        with torch.inference_mode():
            while not self._stopping.is_set():
                batch = self._next_batch()
                if batch:
                    self._convert_safely(batch)

    def _next_batch(self) -> Batch | None:
        with self._changed:
            off = self._desk.disabled
            ready = {i for i, r in enumerate(self._loaded) if r.conversion and r.rule.digest not in off}
            batch = self._queue.take(self._config.batch_pages, self._clock.now(), ready)
            if batch is None:
                self._changed.wait(_WAIT_S)
            return batch

    def _convert_safely(self, batch: Batch) -> None:
        made, reasons, seconds = 0, Counter[str](), 0.0
        try:
            made, reasons, seconds = self._convert(batch)
        except MoonpoolError as e:  # the pool went away or is full: these pages are misses
            reasons[type(e).__name__] += len(batch.pages)
        except Exception:  # process edge: one bad batch must not end the worker
            log.exception("conversion failed (%s)", self._config.rules[batch.rule].name)
            reasons["internal"] += len(batch.pages)
        with self._changed:
            self._totals.pages += made
            self._loaded[batch.rule].pages += made
            self._totals.seconds += seconds
            self._totals.rejected += reasons
            self._queue.done(batch)
            self._changed.notify_all()

    def _convert(self, batch: Batch) -> tuple[int, Counter[str], float]:
        """Pages made, reasons for those not made, seconds of arithmetic."""
        rule, conversion = self._config.rules[batch.rule], self._loaded[batch.rule].conversion
        assert conversion is not None
        reasons = Counter[str]()
        source = [PageKey(rule.source.owner, p.index, p.block) for p in batch.pages]
        with self._pool.open_read([k.text for k in source]) as lease:
            jobs = [(key, view) for key, view in zip(source, lease.views, strict=True) if view is not None]
            reasons["source_missing"] += len(source) - len(jobs)
            wanted = [
                (key.of(rule.target.owner).converted(rule.digest).text, conversion.target_bytes) for key, _ in jobs
            ]
            space = self._pool.reserve(wanted) if wanted else []
            todo: list[tuple[PageKey, memoryview, Reservation]] = []
            for (key, view), got in zip(jobs, space, strict=True):
                if isinstance(got, Reservation):
                    todo.append((key, view, got))
                else:
                    reasons["existed" if got is Put.EXISTED else type(got).__name__] += 1
            made, seconds = self._fill(conversion, todo, reasons)
        return made, reasons, seconds

    def _fill(
        self, conversion: Conversion, todo: list[tuple[PageKey, memoryview, Reservation]], reasons: Counter[str]
    ) -> tuple[int, float]:
        if not todo:
            return 0, 0.0
        open_ = [r for _, _, r in todo]
        try:
            start = self._clock.now()
            errors = conversion.run([v for _, v, _ in todo], [k.index for k, _, _ in todo], [r.view for r in open_])
            seconds = self._clock.now() - start
        except BaseException:
            self._pool.revoke(open_)
            raise
        bad = [r for r, e in zip(open_, errors, strict=True) if e is not None]
        good = [r for r, e in zip(open_, errors, strict=True) if e is None]
        reasons.update(type(e).__name__ for e in errors if e is not None)
        self._pool.revoke(bad)
        outcomes = self._pool.commit(good)
        reasons.update(type(o).__name__ for o in outcomes if isinstance(o, MoonpoolError))
        return sum(o is Put.STORED for o in outcomes), seconds


def _index(rules: list[Rule], owner: Callable[[Rule], str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for i, rule in enumerate(rules):
        found.setdefault(owner(rule), []).append(i)
    return found
