"""Events of this process: the peer announces nothing, so what passes through this pool is what is heard, and what `watch` finds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from moonpool.errors import PoolClosed
from moonpool.keys import PageKey
from moonpool.store.base import EventStream
from moonpool.types import PoolEvent


class LocalEvents:
    """Hands events of native pages to the streams of their owners. Never makes the emitter wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._streams: dict[LocalStream, frozenset[str]] = {}
        self.dropped = 0
        """Of all streams that ever were."""

    def subscribe(self, owners: Sequence[str], capacity: int) -> LocalStream:
        stream = LocalStream(self, self._changed, capacity)
        with self._changed:
            self._streams[stream] = frozenset(owners)
        return stream

    def owners(self) -> frozenset[str]:
        """Those that somebody listens to."""
        with self._changed:
            return frozenset().union(*self._streams.values())

    def emit(self, events: Sequence[PoolEvent]) -> None:
        """Events of keys that are no native pages are passed over."""
        if not events or not self._streams:
            return
        with self._changed:
            for event in events:
                page = PageKey.parse(event.key)
                if page and not page.origin:
                    for stream in [s for s, owners in self._streams.items() if page.owner in owners]:
                        self.dropped += stream.push(event)
            self._changed.notify_all()

    def forget(self, stream: LocalStream) -> None:
        with self._changed:
            self._streams.pop(stream, None)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            streams = list(self._streams)
        for stream in streams:
            stream.close()


class LocalStream(EventStream):
    def __init__(self, hub: LocalEvents, changed: threading.Condition, capacity: int) -> None:
        self._hub, self._changed = hub, changed
        self._events: deque[PoolEvent] = deque(maxlen=capacity)
        self._closed = False
        self.dropped = 0

    def push(self, event: PoolEvent) -> int:
        """The hub calls it, with the lock held. Returns how many were dropped for it."""
        lost = int(len(self._events) == self._events.maxlen)
        self.dropped += lost
        self._events.append(event)
        return lost

    def next(self, limit: int, timeout: float) -> list[PoolEvent]:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._events, timeout)
            if self._closed:
                raise PoolClosed("the stream is closed")
            return [self._events.popleft() for _ in range(min(limit, len(self._events)))]

    def close(self) -> None:
        self._closed = True
        self._hub.forget(self)
