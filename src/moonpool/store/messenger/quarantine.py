"""Space of writers whose session ended while they were writing. It must not be given to anybody while they could still write.

A session's end does not say that its process is gone: a client that gave up waiting hangs up, and a thread of it may be in the
middle of a copy into shared memory. So the space is held until the process has ended, or, for one that lives on, for as long as
nobody copies one object. A writer on another machine cannot reach the memory once its data connections are closed.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.clock import Clock
from moonpool.store.messenger.objects import Object

HELD_S = 60.0


class Process:
    """Another process of this machine, by its pidfd, which no later process of the same number can be taken for."""

    def __init__(self, pid: int) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):  # gone already, or no descriptor left: then only time tells
            self._fd = os.pidfd_open(pid)

    def ended(self) -> bool:
        if self._fd < 0:
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(slots=True)
class _Held:
    objects: Sequence[Object]
    process: Process
    until: float


class Quarantine:
    """Not thread-safe; the service locks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: list[_Held] = []

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, objects: Sequence[Object], process: Process) -> None:
        """Takes over `process`."""
        self._held.append(_Held(objects, process, self._clock.now() + HELD_S))

    def over(self) -> list[Object]:
        """Objects whose writers cannot write any more; they are not held here any longer."""
        now = self._clock.now()
        free: list[Object] = []
        kept: list[_Held] = []
        for held in self._held:
            if held.process.ended() or now >= held.until:
                free += held.objects
                held.process.close()
            else:
                kept.append(held)
        self._held = kept
        return free

    def close(self) -> None:
        for held in self._held:
            held.process.close()
        self._held = []
