"""Continuous batching: one thread loads prefixes, one thread owns the model.

    submit ─► waiting ─(loader thread: look up, read)─► ready ─(model thread)─► prefill in chunks ─► decode in a batch ─► end

The model thread's loop does one prefill chunk and then one decode step for all sequences that decode, so a long prompt delays
running answers by one chunk at most. Loading is off that thread: a slow pool delays only the request that needs it.

Chunks are cut at absolute multiples of `prefill_chunk`. With `prefill_chunk == page_size` every matrix has the same shape
whether a prefix came from the pool or not, and results are bit-identical; with larger chunks (faster) only the chunk in which
a hit ends has another shape, which changes nothing but the order of additions.

Everything is bounded: `max_queue` waiting, `max_batch` running, one more loaded ahead. Every wait has an end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from moonpool.clock import Clock
from moonpool.engine.fuse import Fusion, SourceKV, Unfused
from moonpool.engine.model import Runner
from moonpool.engine.plan import plan_prefix
from moonpool.engine.prefix import LoadCounters, PrefixLoader
from moonpool.engine.publish import Publisher, StoreCounters, StoreJob
from moonpool.engine.request import EngineClosed, EngineFailed, QueueFull
from moonpool.engine.rules import EngineRules
from moonpool.engine.sequence import RunningSequence
from moonpool.engine.shadow import ShadowChecks
from moonpool.engine.speculative import Speculation
from moonpool.engine.stats import EngineStats, Totals
from moonpool.errors import ConfigError, DeadlineExceeded, MoonpoolError

log = logging.getLogger(__name__)

_IDLE_S = 0.1
"""An idle thread looks again after so long, for deadlines and aborts of waiting requests."""
_POLL_S = 0.02
"""How often a request that waits for conversions looks again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one instance. Raises ConfigError for a value that makes no sense."""

    max_batch: int = 8
    max_queue: int = 64
    prefill_chunk: int = 256
    """Prompt tokens computed at once."""
    store_queue: int = 32
    """Requests whose pages wait to be stored."""
    decode_reserve: int = 256
    """Tokens of the answer that room is taken for at the start; more is taken as the answer grows."""

    def check(self, page_size: int) -> None:
        for name, low in (("max_batch", 1), ("max_queue", 1), ("store_queue", 1), ("decode_reserve", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} too small", need=f">= {low}", have=str(getattr(self, name)))
        if self.prefill_chunk < page_size or self.prefill_chunk % page_size:
            need = f"a multiple of the page size ({page_size})"
            raise ConfigError("prefill_chunk does not fit the pages", need=need, have=str(self.prefill_chunk))


class Scheduler:
    """Runs `RunningSequence`s to their end. `close` may be called twice; after it `submit` raises EngineClosed."""

    def __init__(
        self,
        runner: Runner,
        loader: PrefixLoader | None,
        publisher: Publisher | None,
        limits: Limits,
        clock: Clock,
        *,
        fusion: Fusion | None = None,
        rules: EngineRules | None = None,
        shadow: ShadowChecks | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._runner, self._loader, self._publisher, self._fusion = runner, loader, publisher, fusion
        self._rules, self._shadow, self._speculation = rules, shadow, speculation
        self._limits, self._clock = limits, clock
        self._cond = threading.Condition()
        self._waiting: list[RunningSequence] = []
        self._loading: RunningSequence | None = None
        self._ready: list[RunningSequence] = []
        self._active: list[RunningSequence] = []
        self._closing = False
        self._totals = Totals()
        self._threads = [
            threading.Thread(target=self._load_loop, name="moonpool-load", daemon=True),
            threading.Thread(target=self._model_loop, name="moonpool-model", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # -- any thread

    def submit(self, seq: RunningSequence) -> None:
        """Queue a sequence. Raises QueueFull or EngineClosed; then no event is sent for it."""
        with self._cond:
            if self._closing:
                raise EngineClosed("the instance is shutting down")
            if len(self._waiting) >= self._limits.max_queue:
                self._totals.rejected += 1
                most = str(self._limits.max_queue)
                raise QueueFull("too many requests wait", need=f"< {most} waiting", have=most, fix="Try again later.")
            self._waiting.append(seq)
            self._totals.requests += 1
            self._cond.notify_all()

    def close(self, timeout: float) -> None:
        """Stop: what runs or waits fails with EngineClosed. The step under way is finished first."""
        with self._cond:
            self._closing = True
            self._cond.notify_all()
        for thread in self._threads:
            thread.join(timeout)

    @property
    def closing(self) -> bool:
        return self._closing

    def stats(self) -> EngineStats:
        with self._cond:
            waiting = len(self._waiting) + (self._loading is not None) + len(self._ready)
            load = self._loader.counters if self._loader else LoadCounters()
            store = self._publisher.counters if self._publisher else StoreCounters()
            return self._totals.snapshot(waiting, len(self._active), load, store)

    # -- loader thread

    def _load_loop(self) -> None:
        while True:
            with self._cond:
                if self._closing:
                    break
                self._drop_dead(self._waiting)
                seq = self._take_waiting()
                if seq is None:
                    self._cond.wait(self._next_poll())
                    continue
            again = not self._guarded([seq], partial(self._prepare, seq))
            with self._cond:
                self._loading = None
                if again:
                    self._waiting.insert(0, seq)
                elif seq.closed:
                    self._totals.add(seq)
                else:
                    self._ready.append(seq)
                self._cond.notify_all()
        self._fail_all(self._waiting)
        self._fail_all(self._ready)  # both threads do this: whichever ends last finds what the other left

    def _take_waiting(self) -> RunningSequence | None:
        held = len(self._ready) + len(self._active)
        now = self._clock.now()
        seq = next((s for s in self._waiting if s.poll_at <= now), None)
        if seq is None or held > self._limits.max_batch:
            return None
        self._waiting.remove(seq)
        self._loading = seq
        return seq

    def _next_poll(self) -> float:
        now = self._clock.now()
        return min([_IDLE_S, *(max(0.001, s.poll_at - now) for s in self._waiting if s.poll_at > now)])

    def _prepare(self, seq: RunningSequence) -> bool:
        """Look up and load the prefix. False: look again at `poll_at`, conversions may still come."""
        start = self._clock.now()
        if seq.keys is None:
            seq.timing.queue = start - seq.submitted
            seq.keys = seq.identity.page_keys(seq.request.prompt) if self._loader else []
        allow = seq.request.allow_converted
        if self._fusion and not isinstance(seq.fusing, SourceKV):
            seq.fusing = self._fusion.fetch(seq.keys, len(seq.request.prompt), allow)
        if isinstance(seq.fusing, SourceKV):
            allow = False  # what is fused is the target's own cache
        matches = self._loader.lookup(seq.keys, allow, seq.request.prompt) if self._loader else []
        looked = self._clock.now()
        seq.timing.lookup += looked - start
        if self._loader and looked < seq.wait_until and self._loader.may_improve(matches, allow):
            seq.poll_at = min(looked + _POLL_S, seq.wait_until)
            return False
        prompt = len(seq.request.prompt)
        kv = self._runner.new_sequence(prompt + min(seq.request.max_tokens, self._limits.decode_reserve))
        must_compute = max(1, seq.request.prompt_logits)
        if self._loader:
            seq.plan = self._loader.load(kv, matches, prompt, must_compute)
        else:
            seq.plan = plan_prefix(prompt, self._runner.shape.tokens, [])
        seq.kv = kv
        if self._speculation:
            self._speculation.fetch(seq)
        seq.timing.load = self._clock.now() - looked
        return True

    # -- model thread

    def _model_loop(self) -> None:
        while True:
            with self._cond:
                idle = not self._active and not self._ready
                check = self._shadow if idle and not self._waiting and self._loading is None else None
                if idle and not (check and check.due):
                    self._cond.wait(_IDLE_S)
                    check = None
                if self._closing:
                    break
                room = self._limits.max_batch - len(self._active)
                self._active += self._ready[:room]
                del self._ready[:room]
                self._drop_dead(self._active)
                prefill = next((s for s in self._active if not s.prefilled), None)
                decode = [s for s in self._active if s.prefilled]
            if check is not None:
                self._guarded([], partial(self._check, check))
            if prefill is not None:
                self._guarded([prefill], partial(self._prefill, prefill))
            if decode:
                self._guarded(decode, partial(self._decode, decode))
            self._retire()
        self._fail_all(self._active)
        self._fail_all(self._ready)

    def _prefill(self, seq: RunningSequence) -> bool:
        """One chunk; behind the last one, the first token."""
        assert seq.kv is not None
        start = self._clock.now()
        chunk = seq.next_chunk(self._limits.prefill_chunk)
        if source := seq.fuse_now():
            self._fuse(seq, source)
        wanted = seq.wanted_logits(seq.kv.length + len(chunk), len(chunk))
        logits = self._runner.forward([seq.kv], [chunk], keep=wanted)[0]
        now = self._clock.now()
        seq.timing.prefill += now - start
        seq.keep_prompt_logits(logits)
        if seq.prefilled:
            self._store(seq)  # before the answer: another request may want this prefix now
            self._mark(seq, logits[-1])
            seq.accept(logits[-1], now)
        return True

    def _mark(self, seq: RunningSequence, logits: Tensor) -> None:
        """An answer over converted pages is counted, marked if their rule is served by force, and perhaps checked later."""
        assert seq.plan is not None
        if self._rules and seq.plan.bundles:
            seq.forced = self._rules.forced(seq.plan.bundles)
            self._rules.answered(seq.plan.bundles)
            if self._shadow:
                self._shadow.offer(seq.plan.bundles, seq.request.prompt, logits)

    def _check(self, shadow: ShadowChecks) -> bool:
        shadow.step()
        return True

    def _fuse(self, seq: RunningSequence, source: SourceKV) -> None:
        """Store what the sequence computed natively, then go on over the fused cache."""
        assert self._fusion is not None
        assert seq.kv is not None
        self._store(seq)
        made = self._fusion.apply(seq.kv, source)
        if isinstance(made, Unfused):
            seq.fusing = made
        else:
            seq.kv, seq.fused = made, True

    def _decode(self, batch: list[RunningSequence]) -> bool:
        """One token for each sequence; perhaps several for one that decodes alone."""
        if len(batch) == 1 == len(self._active) and self._speculation and self._speculation.step(batch[0]):
            return True
        start = self._clock.now()
        caches = [s.kv for s in batch if s.kv is not None]
        logits = self._runner.forward(caches, [[s.generated[-1]] for s in batch], keep=1)
        now = self._clock.now()
        for seq, row in zip(batch, logits, strict=True):
            seq.timing.decode += now - start
            seq.accept(row[0], now)
        return True

    def _store(self, seq: RunningSequence) -> None:
        """Offer the pages that became complete since the last time, if this sequence computed them natively."""
        if self._publisher is None or seq.kv is None or seq.plan is None or seq.fused:
            return
        pages = [i for i in seq.plan.storable(seq.kv.length) if i >= seq.stored_to]
        seq.stored_to = seq.kv.length // seq.plan.page_size
        tokens = [*seq.request.prompt, *seq.generated][: seq.kv.length]
        if pages:
            self._publisher.offer(StoreJob(seq.identity, tokens, pages, *seq.kv.tokens(0, seq.kv.length)))

    def _retire(self) -> None:
        """Take finished sequences out of the batch."""
        done = [s for s in self._active if s.finish_reason is not None or s.closed]
        for seq in done:
            self._store(seq)
            seq.finish(self._clock.now())
        with self._cond:
            for seq in done:
                self._active.remove(seq)
                self._totals.add(seq)
            self._cond.notify_all()

    # -- both

    def _drop_dead(self, sequences: list[RunningSequence]) -> None:
        """End what was aborted or is over its deadline. Called under the lock."""
        now = self._clock.now()
        for seq in [s for s in sequences if s.handle.aborted or now >= s.deadline]:
            sequences.remove(seq)
            if seq.handle.aborted:
                seq.finish_reason = "abort"
                seq.finish(now)
            else:
                allowed = f"{seq.request.deadline_s:g} s"
                seq.fail(DeadlineExceeded("the request's deadline passed", need=allowed, fix="Raise deadline_s."))
            self._totals.add(seq)

    def _guarded(self, sequences: list[RunningSequence], step: Callable[[], bool]) -> bool:
        """Run a step; if it raises, its sequences fail and the engine goes on."""
        try:
            return step()
        except MoonpoolError as e:
            error = e
        except Exception as e:  # process edge: torch raises anything; one request must not end all others
            log.exception("engine step failed")
            error = EngineFailed(f"the engine failed: {type(e).__name__}: {e}")
        for seq in sequences:
            seq.fail(error)
        return True

    def _fail_all(self, sequences: list[RunningSequence]) -> None:
        with self._cond:
            doomed = list(sequences)
            sequences.clear()
        for seq in doomed:
            seq.fail(EngineClosed("the instance is shutting down"))
