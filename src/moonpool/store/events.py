"""One stream out of the event queues of all messengers. Each has a connection of its own, since waiting there blocks it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool.errors import ConnectionLost, DeadlineExceeded, LeaseExpired, PoolClosed
from moonpool.store.base import EventStream
from moonpool.store.links import MessengerLink
from moonpool.types import PoolEvent
from moonpool.wire import messages as m

_MAX_WAIT_S = 1.0
"""Longest wait at one messenger; messengers that joined meanwhile are heard after it."""
_TURN_S = 0.02
"""Wait at each of several messengers before the next gets its turn."""


@dataclass(slots=True)
class _Source:
    link: MessengerLink
    subscription: int
    dropped: int = 0


class MergedEvents(EventStream):
    """`sources` tells how to reach each messenger; it is asked again and again, so messengers may come and go.

    One thread reads; any thread may close, which wakes the reader with PoolClosed.
    """

    def __init__(
        self, owners: Sequence[str], capacity: int, sources: Callable[[], dict[str, Callable[[], MessengerLink]]]
    ) -> None:
        self._owners, self._capacity, self._list = list(owners), capacity, sources
        self._open: dict[str, _Source] = {}
        self._lost = 0
        self._closed = False
        self._lock = threading.Lock()
        self._join()

    @property
    def dropped(self) -> int:  # type: ignore[override]
        return self._lost + sum(s.dropped for s in list(self._open.values()))

    def next(self, limit: int, timeout: float) -> list[PoolEvent]:
        deadline = time.monotonic() + timeout
        while True:
            events = self._sweep(limit, deadline)
            if events or time.monotonic() >= deadline:
                return events

    def _sweep(self, limit: int, deadline: float) -> list[PoolEvent]:
        """One turn at each messenger; waits only while there is nothing yet."""
        self._join()
        turn = _MAX_WAIT_S if len(self._open) == 1 else _TURN_S
        events: list[PoolEvent] = []
        for name, source in list(self._open.items()):
            wait = 0.0 if events else max(0.0, min(turn, deadline - time.monotonic()))
            events += self._read(name, source, limit - len(events), wait)
            if len(events) >= limit:
                break
        return events

    def _join(self) -> None:
        """Subscribe where we are not yet. Raises ConnectionLost if no messenger can be reached, PoolClosed after `close`."""
        for name, connect in self._list().items():
            if name not in self._open:
                try:
                    source = self._subscribe(connect)
                except (ConnectionLost, DeadlineExceeded):
                    continue
                self._add(name, source)
        self._check_open()
        if not self._open:
            raise ConnectionLost("no messenger can be reached for events")

    def _add(self, name: str, source: _Source) -> None:
        with self._lock:
            if not self._closed:
                self._open[name] = source
                return
        source.link.close()

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed("the stream is closed")

    def _subscribe(self, connect: Callable[[], MessengerLink]) -> _Source:
        self._check_open()
        link = connect()
        try:
            return _Source(link, link.channel.call(m.Subscribe(self._owners, self._capacity), m.Subscribed).id)
        except BaseException:
            link.close()
            raise

    def _read(self, name: str, source: _Source, limit: int, timeout: float) -> list[PoolEvent]:
        try:
            reply = source.link.channel.call(m.NextEvents(source.subscription, limit, timeout), m.Events)
        except (ConnectionLost, DeadlineExceeded, LeaseExpired, PoolClosed):
            self._check_open()
            self._lost += source.dropped
            self._open.pop(name, None)
            source.link.close()
            return []
        source.dropped = reply.dropped
        return reply.events

    def close(self) -> None:
        with self._lock:
            self._closed = True
            open_, self._open = self._open, {}
        for source in open_.values():
            self._lost += source.dropped
            source.link.close()
