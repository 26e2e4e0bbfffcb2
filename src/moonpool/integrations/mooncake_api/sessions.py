"""Sessions: one lookup (or one reservation) per object, then its bytes layer by layer, then the end.

A get session holds the objects' bytes: nothing evicts them until it ends. What a put session reserved is invisible until its end.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import msgspec

from moonpool.errors import ConfigError, LeaseExpired, MoonpoolError
from moonpool.integrations.mooncake_api.codes import Code, coded, coded_each, refused
from moonpool.integrations.mooncake_api.data import Data, Pointers, same_length
from moonpool.integrations.mooncake_api.keys import usable
from moonpool.integrations.mooncake_api.memory import view_at
from moonpool.integrations.mooncake_api.replicate import ReplicateConfig
from moonpool.store.base import ReadLease, Reservation
from moonpool.transfer.copying import copy
from moonpool.types import Put, PutOutcome

_PLAIN = ReplicateConfig()


class _Writing:
    """One object of a put session. It ends only when nobody is copying into it."""

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation
        self.lock = threading.Lock()
        self.ended = False


class _Reading:
    """The lease of one `batch_get_session_start`, shared by its keys; the last one closes it."""

    def __init__(self, lease: ReadLease, users: int) -> None:
        self._lease, self._users, self._lock = lease, users, threading.Lock()

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Keeps the bytes until the block ends. Raises LeaseExpired if the session has ended."""
        with self._lock:
            if not self._users:
                raise LeaseExpired("the session has ended")
            self._users += 1
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self._lease.close()


class Sessions(Data):
    def __init__(self) -> None:
        super().__init__()
        self._session_lock = threading.Lock()
        self._reading: dict[str, tuple[_Reading, memoryview]] = {}
        self._writing: dict[str, _Writing] = {}

    # -- get

    @coded_each
    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """0 per key, -704 if it is missing. A key whose session is open gets a new one."""
        found = self._present(keys)
        lease = self.pool.open_read(found)
        held = {key: view for key, view in zip(found, lease.views, strict=True) if view is not None}
        if not held:
            lease.close()
        reading = _Reading(lease, len(held))
        with self._session_lock:
            before = [self._reading.pop(key) for key in found if key in self._reading]
            self._reading.update({key: (reading, view) for key, view in held.items()})
        for old, _ in before:
            old.leave()
        return [0 if key in held else int(Code.NOT_FOUND) for key in keys]

    @coded_each
    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Pointers],
        all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Copy ranges of each object (from offset, so many bytes) into its buffers; the bytes read, -600 without a session."""
        same_length(keys, all_buffer_ptrs, all_sizes, all_src_offsets)
        return [
            self._ranged("batch_get_into_multi_buffer_ranges", self._read_ranges, key, *ranges)
            for key, *ranges in zip(keys, all_buffer_ptrs, all_sizes, all_src_offsets, strict=True)
        ]

    def _read_ranges(self, key: str, pointers: Pointers, sizes: Sequence[int], offsets: Sequence[int]) -> int:
        with self._session_lock:
            reading, view = self._reading.get(key) or _no_session(key)
        with reading.using():
            _check_ranges(key, pointers, sizes, offsets, view.nbytes)
            for p, n, at in zip(pointers, sizes, offsets, strict=True):
                copy(view_at(p, n, writable=True), view[at : at + n])
        return sum(sizes)

    @coded
    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        """0, also for keys without a session."""
        with self._session_lock:
            ended = [self._reading.pop(key) for key in dict.fromkeys(keys) if key in self._reading]
        for reading, _ in ended:
            reading.leave()
        return 0

    # -- put

    @coded_each
    def batch_put_session_start(
        self, keys: Sequence[str], sizes: Sequence[int], config: ReplicateConfig = _PLAIN
    ) -> list[int]:
        """Reserve so many bytes per key. 0, or why not: -705 if the key exists, -600 if a session of this store has it open."""
        same_length(keys, sizes)
        options = self._options(keys, config, replace=False)
        with self._session_lock:
            order = {k: i for i, k in reversed(list(enumerate(keys))) if usable(k) and k not in self._writing}
            wanted = sorted(i for i in order.values() if sizes[i] > 0)
            if options.groups:
                options = msgspec.structs.replace(options, groups=tuple(options.groups[i] for i in wanted))
            results = self.pool.reserve([(keys[i], sizes[i]) for i in wanted], options)
            codes = [int(Code.INVALID_PARAMS)] * len(keys)
            for i, result in zip(wanted, results, strict=True):
                if isinstance(result, Reservation):
                    self._writing[keys[i]] = _Writing(result)
                    codes[i] = 0
                else:
                    codes[i] = (
                        int(Code.EXISTS) if isinstance(result, Put) else refused("batch_put_session_start", result)
                    )
        return codes

    @coded_each
    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Pointers],
        all_sizes: Sequence[Sequence[int]],
        all_dst_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Copy each key's buffers to their offsets in the object; the bytes written, -600 without a session."""
        same_length(keys, all_buffer_ptrs, all_sizes, all_dst_offsets)
        return [
            self._ranged("batch_put_from_multi_buffer_ranges", self._write_ranges, key, *ranges)
            for key, *ranges in zip(keys, all_buffer_ptrs, all_sizes, all_dst_offsets, strict=True)
        ]

    def _write_ranges(self, key: str, pointers: Pointers, sizes: Sequence[int], offsets: Sequence[int]) -> int:
        with self._session_lock:
            writing = self._writing.get(key) or _no_session(key)
        with writing.lock:
            if writing.ended:
                _no_session(key)
            target = writing.reservation.view
            _check_ranges(key, pointers, sizes, offsets, target.nbytes)
            for p, n, at in zip(pointers, sizes, offsets, strict=True):
                copy(target[at : at + n], view_at(p, n))
        return sum(sizes)

    @coded_each
    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """Make the objects visible. 0 per key, -600 without a session, -707 if it outlived its time."""
        ended = self._end_writing(keys)
        outcomes = dict(zip(ended, self.pool.commit(list(ended.values())), strict=True))
        return [_NO_SESSION if key not in outcomes else _code("batch_put_session_end", outcomes[key]) for key in keys]

    @coded_each
    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        """Give the space back; nothing became visible. 0 per key, -600 without a session."""
        ended = self._end_writing(keys)
        self.pool.revoke(list(ended.values()))
        return [0 if key in ended else _NO_SESSION for key in keys]

    def _end_writing(self, keys: Sequence[str]) -> dict[str, Reservation]:
        with self._session_lock:
            ended = {key: self._writing.pop(key) for key in dict.fromkeys(keys) if key in self._writing}
        for writing in ended.values():
            with writing.lock:  # a copy that is under way ends first
                writing.ended = True
        return {key: writing.reservation for key, writing in ended.items()}

    # -- both

    def _ranged(self, call: str, action: Callable[..., int], *ranges: Any) -> int:
        try:
            return action(*ranges)
        except MoonpoolError as e:
            return refused(call, e)

    def _closing(self) -> None:
        with contextlib.suppress(MoonpoolError):  # a pool that is away has ended what we had open
            self.pool.revoke(list(self._end_writing(list(self._writing)).values()))
            self.batch_get_session_end(list(self._reading))
        super()._closing()


_NO_SESSION = int(Code.INVALID_PARAMS)


def _no_session(key: str) -> NoReturn:
    raise ConfigError("no session is open for it", key=key, fix="Call batch_..._session_start first.")


def _check_ranges(key: str, pointers: Pointers, sizes: Sequence[int], offsets: Sequence[int], size: int) -> None:
    """Raises ConfigError for a range that is not inside an object of `size` bytes."""
    same_length(pointers, sizes, offsets)
    for n, at in zip(sizes, offsets, strict=True):
        if n < 0 or at < 0 or at + n > size:
            raise ConfigError("range outside the object", key=key, need=f"inside {size} B", have=f"{n} B at {at}")


def _code(call: str, outcome: PutOutcome) -> int:
    return refused(call, outcome) if isinstance(outcome, MoonpoolError) else 0
