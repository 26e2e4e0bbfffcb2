"""The master's RPC shell."""

from __future__ import annotations

import secrets
import threading
from typing import Any

from moonpool.clock import Clock, SystemClock
from moonpool.errors import ProtocolError
from moonpool.store.master.state import MasterState
from moonpool.wire import messages as m
from moonpool.wire.rpc import Service


class MasterService(Service):
    requests = m.MasterRequest

    def __init__(self, c2c_config: bytes = b"", *, clock: Clock | None = None, expiry_s: float = 10.0) -> None:
        self.generation = secrets.token_hex(8)
        self._c2c = c2c_config
        self._state = MasterState(clock or SystemClock(), expiry_s=expiry_s)
        self._lock = threading.Lock()
        self._sessions = 0

    def open_session(self) -> int:
        with self._lock:
            self._sessions += 1
            return self._sessions

    def close_session(self, session: int) -> None:
        """A session holds nothing: a messenger whose connection breaks is still alive until its heartbeats stop."""

    def tick(self) -> None:
        with self._lock:
            self._state.tick()

    def handle(self, session: int, request: Any) -> m.Message:
        with self._lock:
            return self._answer(request)

    def _answer(self, request: Any) -> m.Message:
        match request:
            case m.Hello():
                return m.Registered(self.generation)
            case m.Register(name, socket, generation):
                self._state.register(name, socket, generation)
                return m.Registered(self.generation)
            case m.Heartbeat(name):
                self._state.heartbeat(name)
                return m.Registered(self.generation)
            case m.Publish(name, added, removed):
                self._state.publish(name, added, removed)
                return m.Registered(self.generation)
            case m.ListMessengers():
                return m.Messengers(self._state.messengers())
            case m.Locate(keys):
                return m.Located(self._state.locate(keys))
            case m.GetC2C():
                return m.C2C(self._c2c)
            case _:
                raise ProtocolError("not a master's request", have=type(request).__name__)
