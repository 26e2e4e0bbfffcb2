"""Tells the master what this messenger holds: batched, in its own thread, never in a put's way.

The master may be away or forget everything at any time. Each reply carries the master's generation; when it changes, or when the
master does not know us, everything is told anew.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from moonpool.errors import MoonpoolError, NotFound
from moonpool.store.messenger.service import MessengerService
from moonpool.wire import messages as m
from moonpool.wire.rpc import SocketChannel

log = logging.getLogger(__name__)

T = TypeVar("T")

_PERIOD_S = 0.05
_HEARTBEAT_S = 1.0
_BATCH = 4096
_BACKOFF_S = (0.1, 2.0)


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of at most `size` items, in order."""
    rest = iter(items)
    while piece := list(islice(rest, size)):
        yield piece


class Publisher:
    """Runs from construction to `close`."""

    def __init__(self, service: MessengerService, name: str, socket: str, master: str) -> None:
        self._service, self._name, self._socket, self._master = service, name, socket, master
        self._channel: SocketChannel | None = None
        self._generation = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if channel := self._channel:
            channel.close()  # wakes a call to a master that does not answer
        self._thread.join()
        self._drop_channel()

    def _run(self) -> None:
        idle, backoff = 0.0, _BACKOFF_S[0]
        while not self._stop.wait(_PERIOD_S):
            try:
                idle = 0.0 if self._publish() else idle + _PERIOD_S
                if idle >= _HEARTBEAT_S:
                    self._check(self._call(m.Heartbeat(self._name)))
                    idle = 0.0
                backoff = _BACKOFF_S[0]
            except NotFound:
                self._generation = ""  # the master forgot us: register again at once
            except MoonpoolError as e:
                log.debug("master is away: %s", e)
                self._drop_channel()
                self._stop.wait(backoff)
                backoff = min(2 * backoff, _BACKOFF_S[1])

    def _publish(self) -> bool:
        """Send what changed, or everything after a change of master. True if there was something to send."""
        changes = self._service.take_changes()
        if not self._generation or changes.lost:
            self._generation = self._call(m.Register(self._name, self._socket, self._service.generation)).generation
            there = dict.fromkeys(self._service.keys(), True)
        else:
            there = changes.there
        for piece in batched(there.items(), _BATCH):
            added = [k for k, here in piece if here]
            self._check(self._call(m.Publish(self._name, added, [k for k, here in piece if not here])))
        return bool(there)

    def _check(self, reply: m.Registered) -> None:
        if reply.generation != self._generation:
            self._generation = ""

    def _call(self, request: m.Message) -> m.Registered:
        if self._channel is None:
            self._channel = SocketChannel(self._master, timeout=5.0)
        return self._channel.call(request, m.Registered)

    def _drop_channel(self) -> None:
        self._generation = ""
        if self._channel:
            self._channel.close()
            self._channel = None
