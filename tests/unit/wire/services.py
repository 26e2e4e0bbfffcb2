"""A service of a few verbs, one for each way to answer."""

from __future__ import annotations

import threading
from typing import Any

from moonpool.errors import NotFound
from moonpool.wire import framing, rpc
from moonpool.wire import messages as m
from moonpool.wire.auth import Peer


class Fake(rpc.Service):
    requests = m.MasterRequest

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.opened = 0
        self.peers: list[Peer] = []
        self.lend: int | None = None
        self.hold = threading.Event()
        self.lock = threading.Lock()

    def open_session(self) -> int:
        with self.lock:
            self.opened += 1
            self.open.add(self.opened)
            return self.opened

    def identify(self, session: int, peer: Peer) -> None:
        self.peers.append(peer)

    def close_session(self, session: int) -> None:
        with self.lock:
            self.open.remove(session)

    def handle(self, session: int, request: Any) -> m.Message:
        match request:
            case m.Locate(keys):
                return m.Located([[k] for k in keys])
            case m.SetQuota(tenant=name):
                raise NotFound("no such messenger", key=name, need="n", have="h", fix="Register.")
            case m.ListMessengers():
                self.hold.wait(10)
                return m.Messengers([])
            case m.GetC2C():
                return m.C2C(bytes(framing.MAX_FRAME))
            case _:
                raise RuntimeError("a bug")

    def descriptor(self, request: Any) -> int | None:
        return self.lend
