"""The messenger's RPC shell: one lock around `MessengerState`, messages in and out, a condition for who waits for events."""

from __future__ import annotations

import secrets
import threading
from typing import Any

from moonpool.clock import Clock, SystemClock
from moonpool.errors import ConnectionLost, MoonpoolError, ProtocolError
from moonpool.store.messenger.state import Changes, Limits, MessengerState, Reserved
from moonpool.transfer.segment import Segment
from moonpool.types import PoolStats, Put
from moonpool.wire import messages as m
from moonpool.wire.rpc import Service, error_message


class MessengerService(Service):
    requests = m.MessengerRequest

    def __init__(self, segment: Segment, *, clock: Clock | None = None, limits: Limits | None = None) -> None:
        self.segment = segment
        self.generation = secrets.token_hex(8)
        self._state = MessengerState(segment.size, clock or SystemClock(), limits)
        self._lock = threading.Lock()
        self._events = threading.Condition(self._lock)
        self._sessions = 0
        self._closing = False

    def open_session(self) -> int:
        with self._lock:
            self._sessions += 1
            return self._sessions

    def close_session(self, session: int) -> None:
        with self._lock:
            self._state.end_session(session)
            self._events.notify_all()

    def descriptor(self, request: Any) -> int | None:
        return self.segment.fd if isinstance(request, m.Hello) else None

    def close(self) -> None:
        """Wake everybody who waits; later requests are refused."""
        with self._lock:
            self._closing = True
            self._events.notify_all()

    def handle(self, session: int, request: Any) -> m.Message:
        with self._lock:
            if self._closing:
                raise ConnectionLost("the messenger is closing")
            reply = self._answer(session, request)
            if isinstance(request, m.Commit | m.Announce) and self._state.watches():
                self._events.notify_all()
            return reply

    def _answer(self, session: int, request: Any) -> m.Message:
        state = self._state
        match request:
            case m.Reserve(items):
                return m.Reserved([_reserved(state.reserve(session, key, size)) for key, size in items])
            case m.Commit(ids):
                return self._commit(session, ids)
            case m.Revoke(ids):
                state.revoke(session, ids)
                return m.Done()
            case m.OpenRead(keys):
                return m.Opened(*state.open_read(session, keys))
            case m.CloseRead(leases):
                state.close_read(session, leases)
                return m.Done()
            case m.Lookup(keys, origins):
                return m.Matches(state.lookup(keys, origins))
            case m.Exist(keys):
                return m.Flags(state.exist(keys))
            case m.Remove(keys):
                return m.Flags(state.remove(keys))
            case _:
                return self._answer_rest(session, request)

    def _answer_rest(self, session: int, request: Any) -> m.Message:
        match request:
            case m.Hello():
                return m.Welcome(self.generation, self.segment.size)
            case m.Announce(keys, hinted):
                self._state.announce(keys, hinted=hinted)
                return m.Done()
            case m.Subscribe(owners, capacity):
                return m.Subscribed(self._state.subscribe(session, owners, capacity))
            case m.NextEvents():
                return self._next_events(request)
            case m.GetStats():
                return m.Stats(self._state.stats())
            case _:
                raise ProtocolError("not a messenger's request", have=type(request).__name__)

    def _commit(self, session: int, ids: list[int]) -> m.Committed:
        outcomes = self._state.commit(session, ids)
        return m.Committed([error_message(o) if isinstance(o, MoonpoolError) else m.Done() for o in outcomes])

    def _next_events(self, request: m.NextEvents) -> m.Events:
        """Waits on the condition, which gives the lock up meanwhile."""
        events, dropped = self._state.next_events(request.subscription, request.limit)
        if not events and request.timeout > 0:
            self._events.wait_for(
                lambda: self._closing or self._state.has_events(request.subscription), timeout=request.timeout
            )
            if self._closing:
                raise ConnectionLost("the messenger is closing")
            events, dropped = self._state.next_events(request.subscription, request.limit)
        return m.Events(events, dropped)

    # -- for the publisher, the owner and tests

    def take_changes(self) -> Changes:
        with self._lock:
            return self._state.take_changes()

    def keys(self) -> list[str]:
        with self._lock:
            return self._state.keys()

    def stats(self) -> PoolStats:
        with self._lock:
            return self._state.stats()

    def check_integrity(self) -> None:
        with self._lock:
            self._state.check_integrity()


def _reserved(result: Reserved | Put | MoonpoolError) -> m.Span | m.Existed | m.Error:
    match result:
        case Reserved(id=handle, offset=offset, size=size):
            return m.Span(handle, offset, size)
        case Put():
            return m.Existed()
        case error:
            return error_message(error)
