"""Tells the master what this messenger holds, and that it lives.

What changes is told before it is acknowledged, so that whoever learns of a put finds it anywhere; but the master may be away,
slow or frozen, and no put waits for it longer than `WAIT_S`, once: after that it is told later, in the background, until it keeps
up again. It may also forget everything. Each reply carries its generation; when that changes, or when the master does not know us,
everything is told anew. The only messenger of a pool tells it later, too: every client asks that one itself.

Heartbeats have a thread and a connection of their own: nothing that the index is busy with delays them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from moonpool.errors import DeadlineExceeded, MoonpoolError, NotFound, WireError
from moonpool.store.messenger.records import Changes
from moonpool.store.messenger.service import MessengerService, Told
from moonpool.types import MessengerInfo
from moonpool.wire import messages as m
from moonpool.wire.rpc import Channel

log = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_S = 0.1
_PERIOD_S = 0.05
_ALONE_S = 0.25
"""How long a messenger believes that it is the only one. Puts keep it informed; after a pause the next put asks."""
_HEARTBEAT_S = 1.0
_CALL_S = 5.0
_BATCH = 4096
_BACKOFF_S = (0.1, 2.0)


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of at most `size` items, in order."""
    rest = iter(items)
    while piece := list(islice(rest, size)):
        yield piece


class Publisher(Told):
    """Runs from construction to `close`. `connect` opens a channel to the master; `info` says who we are, with figures."""

    def __init__(
        self, service: MessengerService, info: Callable[[], MessengerInfo], connect: Callable[[], Channel]
    ) -> None:
        self._service, self._info, self._connect = service, info, connect
        self._name = info().name
        self._channel: Channel | None = None
        self._unsent = Changes()
        """Taken from the service and not yet known to the master; told again after a time-out."""
        self._generation = ""
        self._keeps_up = False
        self._alone_until = 0.0
        """Until then there is no other messenger that anybody uses, by the master's last answer."""
        self._heard = threading.Event()
        """Set when the master has heard of us for the first time."""
        self._telling = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name="publisher", daemon=True),
            threading.Thread(target=self._beat, name="heartbeat", daemon=True),
        ]
        self._beating: Channel | None = None
        for thread in self._threads:
            thread.start()

    @property
    def joined(self) -> bool:
        """Whether the master knows us, by its last answer, and has not gone since."""
        return bool(self._generation) and self._beating is not None

    def wait_joined(self, timeout: float) -> bool:
        """Whether the master has heard of us, and no messenger takes itself for the only one any more, at the latest after `timeout`
        seconds."""
        deadline = time.monotonic() + timeout
        return self._heard.wait(timeout) and not self._stop.wait(min(_ALONE_S, max(0.0, deadline - time.monotonic())))

    def close(self) -> None:
        self._stop.set()
        for channel in (self._channel, self._beating):
            if channel:
                channel.close()  # wakes a call to a master that does not answer
        for thread in self._threads:
            thread.join()
        with self._telling:
            self._drop_channel()

    # -- before an acknowledgement

    def wait(self) -> None:
        if time.monotonic() < self._alone_until:  # then every client asks us, and nobody the master
            return
        if not self._keeps_up or not self._telling.acquire(timeout=WAIT_S):
            return
        try:
            self._tell(WAIT_S)
        except MoonpoolError as e:
            self._fell_behind(e)
        finally:
            self._telling.release()

    def _fell_behind(self, e: MoonpoolError) -> None:
        self._keeps_up = False
        log.debug("the master does not keep up: %s", e)
        if isinstance(e, WireError):
            self._drop_channel()
        if not isinstance(e, DeadlineExceeded):
            self._generation = ""

    # -- in the background

    def _run(self) -> None:
        backoff = _BACKOFF_S[0]
        while not self._stop.wait(_PERIOD_S):
            with self._telling:
                try:
                    self._tell(_CALL_S)
                except NotFound:
                    self._generation = ""  # the master forgot us: register again at once
                except MoonpoolError as e:
                    self._fell_behind(e)
                else:
                    self._keeps_up = bool(self._generation)
                    backoff = _BACKOFF_S[0]
                    continue
            if self._channel is None:
                self._stop.wait(backoff)
                backoff = min(2 * backoff, _BACKOFF_S[1])

    def _tell(self, timeout: float) -> None:
        """Send what changed, or everything after a change of master."""
        self._take()
        if not self._generation or self._unsent.lost:
            self._register(timeout)
        while self._unsent.there:
            piece = dict(islice(self._unsent.there.items(), _BATCH))
            added = [key for key, there in piece.items() if there]
            gone = [key for key, there in piece.items() if not there]
            reply = self._call(m.Publish(self._name, added, gone), timeout)
            for key in piece:
                del self._unsent.there[key]
            if reply.generation != self._generation:
                self._generation = ""
                self._register(timeout)

    def _take(self) -> None:
        new = self._service.take_changes()
        self._unsent.lost |= new.lost
        self._unsent.there.update(new.there)

    def _register(self, timeout: float) -> None:
        if not self._keeps_up:
            timeout = _CALL_S
        registered = self._call(m.Register(self._info(), self._service.generation), timeout)
        self._service.set_quotas(registered.quotas)
        self._service.take_changes()
        self._unsent = Changes(there=dict.fromkeys(self._service.keys(), True))
        self._generation = registered.generation
        self._heard.set()

    def _call(self, request: m.Message, timeout: float) -> m.Registered:
        if self._channel is None:
            self._channel = self._connect()
        reply = self._channel.call(request, m.Registered, timeout=timeout)
        self._learn(reply)
        return reply

    def _learn(self, reply: m.Registered) -> None:
        self._alone_until = time.monotonic() + _ALONE_S if reply.members == 1 else 0.0

    def _drop_channel(self) -> None:
        if self._channel:
            self._channel.close()
            self._channel = None

    # -- heartbeats

    def _beat(self) -> None:
        while not self._stop.is_set():
            try:
                if self._beating is None:
                    self._beating = self._connect()
                beat = m.Heartbeat(self._info(), self._service.generation, self._service.used_by_tenant())
                reply = self._beating.call(beat, m.Registered)
                self._service.set_quotas(reply.quotas)
                self._learn(reply)
                if reply.generation != self._generation:
                    self._generation = ""
            except NotFound:
                self._generation = ""
                self._stop.wait(_PERIOD_S)  # the other thread is about to register
                continue
            except MoonpoolError as e:
                log.debug("no heartbeat: %s", e)
                if self._beating:
                    self._beating.close()
                self._beating = None
                self._stop.wait(_BACKOFF_S[0])
                continue
            self._stop.wait(_HEARTBEAT_S)
        if self._beating:
            self._beating.close()
