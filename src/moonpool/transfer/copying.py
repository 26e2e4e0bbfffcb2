"""Copies within one machine: without the interpreter's lock, and large batches by several threads.

One thread does not fill the memory bus, least of all out of shared memory in 4 KiB pages. And a copy that held the lock would stop an
engine's other threads for as long as it takes. numpy's copies release it; below `_SMALL` bytes, asking it costs more than the copy.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import TypeAlias

import numpy as np

Pair: TypeAlias = tuple[memoryview, memoryview]
"""(destination, source) of the same size."""

THREAD_NAME = "moonpool-copy"
_SMALL = 16 << 10
_SHARED_FROM = 2 << 20
"""Bytes; a smaller batch is done before another thread would have begun."""
_WORTH_SHARING = 32 << 10
"""Bytes of a pair on average; with smaller ones the threads only wait for the interpreter's lock."""
_PIECE = 1 << 20
_THREADS = min(4, len(os.sched_getaffinity(0)))


def copy(destination: memoryview, source: memoryview) -> None:
    if len(source) < _SMALL:
        destination[:] = source
    else:
        np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))


def copy_all(pairs: Sequence[Pair]) -> None:
    """All of them; returns when all are done."""
    total = sum(len(source) for _, source in pairs)
    if _THREADS == 1 or total < max(_SHARED_FROM, _WORTH_SHARING * len(pairs)):
        for destination, source in pairs:
            copy(destination, source)
        return
    job = _Job(_pieces(pairs))
    for _ in range(_THREADS - 1):
        _helpers.submit(job)
    job.work()
    job.wait()


def _pieces(pairs: Sequence[Pair]) -> Iterator[Pair]:
    for destination, source in pairs:
        if len(source) <= _PIECE:
            yield destination, source
        else:
            for at in range(0, len(source), _PIECE):
                yield destination[at : at + _PIECE], source[at : at + _PIECE]


class _Job:
    """Pieces that several threads take from, one by one, so that a thread that got no core delays nobody by more than a piece."""

    def __init__(self, pieces: Iterator[Pair]) -> None:
        self._pieces = pieces
        self._lock = threading.Lock()
        self._busy = 0
        self._idle = threading.Condition(self._lock)
        self._failed: BaseException | None = None

    def work(self) -> None:
        with self._lock:
            self._busy += 1
            piece = next(self._pieces, None)
        while piece is not None:
            try:
                copy(*piece)
            except BaseException as e:  # noqa: BLE001 - it is raised where the copy was asked for
                self._failed = e
            with self._lock:
                piece = next(self._pieces, None)
        with self._lock:
            self._busy -= 1
            if not self._busy:
                self._idle.notify_all()

    def wait(self) -> None:
        """Until no piece is being copied. A helper that has not begun finds nothing left."""
        with self._lock:
            self._idle.wait_for(lambda: not self._busy)
        if self._failed:
            raise self._failed


class _Helpers:
    """The process's own threads for copies, started at the first large one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._started = False

    def submit(self, job: _Job) -> None:
        if not self._started:
            self._start()
        self._jobs.put(job)

    def _start(self) -> None:
        with self._lock:
            for i in range(0 if self._started else _THREADS - 1):
                threading.Thread(target=self._run, args=(self._jobs,), name=f"{THREAD_NAME}-{i}", daemon=True).start()
            self._started = True

    @staticmethod
    def _run(jobs: SimpleQueue[_Job]) -> None:
        while True:
            jobs.get().work()


_helpers = _Helpers()


def _forget() -> None:
    """In a child after a fork: its parent's threads are not there."""
    global _helpers
    _helpers = _Helpers()


os.register_at_fork(after_in_child=_forget)
