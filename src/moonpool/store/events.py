"""One stream out of the event queues of all messengers. Each has a connection of its own, since waiting there blocks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool.errors import ConnectionLost, DeadlineExceeded, LeaseExpired
from moonpool.store.base import EventStream
from moonpool.types import PoolEvent
from moonpool.wire import messages as m
from moonpool.wire.rpc import Channel

_MAX_WAIT_S = 10.0
"""Below the channel's own time-out."""


@dataclass(slots=True)
class _Source:
    channel: Channel
    subscription: int
    dropped: int = 0


class MergedEvents(EventStream):
    """`sources` tells how to reach each messenger; it is asked at every `next`, so messengers may come and go."""

    def __init__(
        self, owners: Sequence[str], capacity: int, sources: Callable[[], dict[str, Callable[[], Channel]]]
    ) -> None:
        self._owners, self._capacity, self._list = list(owners), capacity, sources
        self._open: dict[str, _Source] = {}
        self._lost = 0
        self._join()

    @property
    def dropped(self) -> int:  # type: ignore[override]
        return self._lost + sum(s.dropped for s in self._open.values())

    def next(self, limit: int, timeout: float) -> list[PoolEvent]:
        self._join()
        share = min(timeout, _MAX_WAIT_S) / len(self._open)
        events: list[PoolEvent] = []
        for name in list(self._open):
            wait = 0.0 if events else share
            events += self._read(name, limit - len(events), wait)
            if len(events) >= limit:
                break
        return events

    def _join(self) -> None:
        """Subscribe where we are not yet. Raises ConnectionLost if no messenger can be reached."""
        for name, connect in self._list().items():
            if name not in self._open:
                try:
                    self._open[name] = self._subscribe(connect)
                except (ConnectionLost, DeadlineExceeded):
                    continue
        if not self._open:
            raise ConnectionLost("no messenger can be reached for events")

    def _subscribe(self, connect: Callable[[], Channel]) -> _Source:
        channel = connect()
        try:
            return _Source(channel, channel.call(m.Subscribe(self._owners, self._capacity), m.Subscribed).id)
        except BaseException:
            channel.close()
            raise

    def _read(self, name: str, limit: int, timeout: float) -> list[PoolEvent]:
        source = self._open[name]
        try:
            reply = source.channel.call(m.NextEvents(source.subscription, limit, timeout), m.Events)
        except (ConnectionLost, DeadlineExceeded, LeaseExpired):
            self._lost += source.dropped
            self._open.pop(name).channel.close()
            return []
        source.dropped = reply.dropped
        return reply.events

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].channel.close()
