"""From a sequence's cache into the pool, on a thread of its own: storing never delays an answer.

The queue is bounded. When the pool is slower than the engine, pages are *not* stored and that is counted; nothing waits.
A job holds views of finished KV (`SequenceKV` never rewrites it), and the pages are packed straight into the pool's memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moonpool.c2c.pages import pack_into
from moonpool.clock import Clock
from moonpool.errors import KeyBusy, MoonpoolError, NativeExists, PoolError, WireError
from moonpool.keys import KVIdentity
from moonpool.store.base import KVPool, Reservation
from moonpool.types import PageShape, Put

log = logging.getLogger(__name__)

_PAGES_PER_PUT = 32
"""Small enough that a batch is written long before its reservations run out (field-bugs G6)."""


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Native pages to store: `pages` are ascending page indices of `tokens`, `k` and `v` the KV of all of `tokens`."""

    identity: KVIdentity
    tokens: Sequence[int]
    pages: Sequence[int]
    k: Tensor
    v: Tensor


@dataclass(slots=True)
class StoreCounters:
    stored: int = 0
    existed: int = 0
    skipped: int = 0
    """Not stored because the queue was full, or the instance closed first."""
    failed: int = 0
    """Not stored because the pool refused (no space, not reachable)."""


class Publisher:
    """One store thread with a bounded queue. `close` is idempotent and leaves no thread behind if the pool answers."""

    def __init__(self, pool: KVPool, shape: PageShape, clock: Clock, *, depth: int = 32) -> None:
        self._pool, self._shape, self._clock, self._depth = pool, shape, clock, depth
        self._cond = threading.Condition()
        self._jobs: list[StoreJob] = []
        self._busy = False
        self._closing = False
        self.counters = StoreCounters()
        self._thread = threading.Thread(target=self._run, name="moonpool-store", daemon=True)
        self._thread.start()

    def offer(self, job: StoreJob) -> bool:
        """Queue the job, or skip it at once. True if it was queued."""
        if not job.pages:
            return True
        with self._cond:
            if self._closing or len(self._jobs) >= self._depth:
                self.counters.skipped += len(job.pages)
                return False
            self._jobs.append(job)
            self._cond.notify_all()
            return True

    def flush(self, timeout: float) -> bool:
        """Wait until everything queued is stored; False if that takes longer than `timeout` seconds."""
        end = self._clock.now() + timeout
        with self._cond:
            while self._jobs or self._busy:
                left = end - self._clock.now()
                if left <= 0:
                    return False
                self._cond.wait(left)
        return True

    def close(self, timeout: float) -> None:
        """Flush for at most `timeout` seconds, drop (and count) the rest, end the thread."""
        self.flush(timeout)
        with self._cond:
            self._closing = True
            self.counters.skipped += sum(len(j.pages) for j in self._jobs)
            self._jobs.clear()
            self._cond.notify_all()
        self._thread.join(max(1.0, timeout))

    def _run(self) -> None:
        while True:
            with self._cond:
                while not self._jobs and not self._closing:
                    self._cond.wait(0.5)
                if not self._jobs:
                    return
                job, self._busy = self._jobs.pop(0), True
            try:
                self._store(job)
            except (PoolError, WireError):
                self.counters.failed += len(job.pages)
            except Exception as e:  # process edge: one bad job must not end storing for all that come after it
                log.exception("storing failed: %s", e)
                self.counters.failed += len(job.pages)
            finally:
                del job  # its views hold a whole sequence's memory
                with self._cond:
                    self._busy = False
                    self._cond.notify_all()

    def _store(self, job: StoreJob) -> None:
        """Put the pages in order. After the first refusal the rest is dropped: pages behind a gap are never found."""
        keys = job.identity.page_keys(job.tokens)
        for at in range(0, len(job.pages), _PAGES_PER_PUT):
            batch = job.pages[at : at + _PAGES_PER_PUT]
            got = self._pool.reserve([(keys[i].text, self._shape.nbytes) for i in batch])
            outcomes = self._fill(job, batch, got)
            self.counters.stored += sum(o is Put.STORED for o in outcomes)
            self.counters.existed += sum(o is Put.EXISTED or isinstance(o, KeyBusy | NativeExists) for o in outcomes)
            refused = [
                o for o in outcomes if isinstance(o, MoonpoolError) and not isinstance(o, KeyBusy | NativeExists)
            ]
            if refused:
                self.counters.failed += len(refused) + len(job.pages) - at - len(batch)
                return

    def _fill(
        self, job: StoreJob, batch: Sequence[int], got: Sequence[Reservation | Put | MoonpoolError]
    ) -> list[Put | MoonpoolError]:
        reserved = [r for r in got if isinstance(r, Reservation)]
        try:
            for index, r in zip(batch, got, strict=True):
                if isinstance(r, Reservation):
                    span = slice(index * self._shape.tokens, (index + 1) * self._shape.tokens)
                    pack_into(r.view, job.k[span], job.v[span])
        except BaseException:
            self._pool.revoke(reserved)
            raise
        return [*self._pool.commit(reserved), *(r for r in got if not isinstance(r, Reservation))]
