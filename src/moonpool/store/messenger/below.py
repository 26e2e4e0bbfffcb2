"""Memory and disk of one messenger, together: objects are written behind, and read through.

Write-behind: once the segment is filled past `SPILL_ABOVE`, a thread copies objects to disk in the order of their puts, so that
eviction finds a copy below. When puts outrun the disk, what is evicted without a copy is gone, and counted (`lost_unspilled`).
Disk I/O happens outside the messenger's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from moonpool.errors import MoonpoolError, WrongSize
from moonpool.store.messenger.disk import DiskTier
from moonpool.store.messenger.objects import Object
from moonpool.store.messenger.records import Reserved
from moonpool.store.messenger.state import MessengerState
from moonpool.transfer.segment import Segment

SPILL_ABOVE = 0.5
"""Share of the segment that is never copied below: what fits in memory needs no disk."""
_TURN_BYTES = 16 << 20
"""Held as if read while it is written, so it must be little."""
_PERIOD_S = 0.05
_STRIPES = 16
_WRITERS = 2
"""Two write about twice as fast as one: each waits for the disk most of the time."""


class Below:
    """Runs from construction to `close`. `lock` is the messenger's."""

    def __init__(self, state: MessengerState, segment: Segment, disk: DiskTier, lock: threading.Lock) -> None:
        self._state, self._segment, self.disk, self._lock = state, segment, disk, lock
        self._loading = [threading.Lock() for _ in range(_STRIPES)]
        """One load of a key at a time: the next one then finds it in memory."""
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="spill")
        self._stop = threading.Event()
        self._above = SPILL_ABOVE
        self._all_down = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spill", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._writers.shutdown()
        self.disk.close()

    # -- write-behind

    def spill_all(self, timeout: float) -> bool:
        """Copy down from now on whatever the memory holds; for the end. True when that was done, within `timeout` seconds."""
        self._above = 0.0
        return self._all_down.wait(timeout)

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            above = self._above
            while not self._stop.is_set() and self._spill(above):
                pass
            if above == 0.0 and not self._stop.is_set():
                self._all_down.set()

    def _spill(self, above: float) -> bool:
        """One turn. False if there is nothing to do."""
        with self._lock:
            taken = self._state.take_unbacked(_TURN_BYTES) if self._state.fill() > above else []
        list(self._writers.map(self._copy_down, taken))
        gone = self.disk.take_gone()
        if taken or gone:
            with self._lock:
                self._state.backed(taken)
                self._state.gone_below(gone)
        return bool(taken)

    def _copy_down(self, obj: Object) -> None:
        if not self._stop.is_set() and obj.visible:
            self.disk.write(obj.key, self._segment.span(obj.offset, obj.size, readonly=True))
            with self._lock:
                stays = self._state.copied(obj)
            if not stays:  # removed meanwhile, or about to be: it must not come back
                self.disk.remove(obj.key)

    def drop(self, keys: Sequence[str]) -> list[bool]:
        """Remove the copies below; True where there was one. Not with the messenger's lock held."""
        removed = self.disk.remove_many(keys)
        with self._lock:
            self._state.gone_below(self.disk.take_gone())
        return removed

    # -- read-through

    def load(
        self, session: int, keys: Sequence[str], lease: int, spans: list[tuple[int, int] | None]
    ) -> tuple[int, list[tuple[int, int] | None]]:
        """Bring what `open_read` did not find in memory up from the disk, each open in the lease as soon as it is there."""
        with self._lock:
            places = self._state.below(keys)
        for place in places:
            if spans[place] is None:
                lease, spans[place] = self._load_one(session, keys[place], lease)
        return lease, spans

    def _load_one(self, session: int, key: str, lease: int) -> tuple[int, tuple[int, int] | None]:
        with self._loading[hash(key) % _STRIPES]:
            with self._lock:
                got = self._state.begin_load(session, key)
                if got is None:  # another one was faster
                    return self._state.open_one(session, key, lease)
            if isinstance(got, MoonpoolError):
                return lease, None
            return self._fill(session, key, got, lease)

    def _fill(self, session: int, key: str, space: Reserved, lease: int) -> tuple[int, tuple[int, int] | None]:
        good = False
        try:
            good = self.disk.read_into(key, self._segment.span(space.offset, space.size))
        except WrongSize:
            pass  # replaced meanwhile by one of another size
        finally:
            if not good:
                with self._lock:
                    self._state.revoke(session, [space.id])
                    self._state.gone_below([key])
        if not good:
            return lease, None
        with self._lock:
            return self._state.end_load(session, space.id, lease)
