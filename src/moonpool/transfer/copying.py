"""Copies within one machine: without the interpreter's lock, and large batches by several threads.

One thread does not fill the memory bus, least of all out of shared memory in 4 KiB pages. And a copy that held the lock would stop an
engine's other threads for as long as it takes. numpy's copies release it; below `_SMALL` bytes, asking it costs more than the copy.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np

Pair: TypeAlias = tuple[memoryview, memoryview]
"""(destination, source) of the same size."""

THREAD_NAME = "moonpool-copy"
_SMALL = 16 << 10
_SHARED_FROM = 2 << 20
"""Bytes; a smaller batch is done before another thread would have begun."""
_PIECE = 4 << 20
_THREADS = min(4, len(os.sched_getaffinity(0)))


def copy(destination: memoryview, source: memoryview) -> None:
    if len(source) < _SMALL:
        destination[:] = source
    else:
        np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))


def copy_all(pairs: Sequence[Pair]) -> None:
    """All of them; returns when all are done."""
    total = sum(len(source) for _, source in pairs)
    if total < _SHARED_FROM or _THREADS == 1:
        _copy_each(pairs)
        return
    mine, *others = _shares(pairs, total)
    waiting = [_helpers.get().submit(_copy_each, share) for share in others]
    try:
        _copy_each(mine)
    finally:
        for each in waiting:
            each.result()


def _copy_each(pairs: Sequence[Pair]) -> None:
    for destination, source in pairs:
        copy(destination, source)


def _shares(pairs: Sequence[Pair], total: int) -> list[list[Pair]]:
    """One for each thread, about equal in bytes; what is large is cut."""
    each = -(-total // _THREADS)
    shares: list[list[Pair]] = [[]]
    room = each
    for destination, source in pairs:
        at = 0
        while at < len(source):
            size = min(len(source) - at, _PIECE, room)
            shares[-1].append((destination[at : at + size], source[at : at + size]))
            at, room = at + size, room - size
            if not room:
                shares.append([])
                room = each
    return [share for share in shares if share]


class _Helpers:
    """The process's own threads for copies, started at the first large one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def get(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS - 1, thread_name_prefix=THREAD_NAME)
            return self._pool

    def forget(self) -> None:
        """In a child after a fork: its parent's threads are not there."""
        self.__init__()  # type: ignore[misc]


_helpers = _Helpers()
os.register_at_fork(after_in_child=_helpers.forget)
