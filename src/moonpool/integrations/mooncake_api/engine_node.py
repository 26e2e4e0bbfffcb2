"""What the drop-in engine is made of: registered memory, a port where peers reach it, and connections to peers."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from moonpool.errors import ConnectionLost, DeadlineExceeded, MoonpoolError, NotRegistered, PoolClosed
from moonpool.integrations.mooncake_api.engine_names import Directory
from moonpool.integrations.mooncake_api.memory import view_at
from moonpool.transfer import Op, Region, Registry, TransferClient, TransferServer
from moonpool.wire import messages as m
from moonpool.wire.address import TcpAddress
from moonpool.wire.auth import Security
from moonpool.wire.dial import connect
from moonpool.wire.rpc import Server, Service, SocketChannel

log = logging.getLogger(__name__)

_CONNECT_S = 5.0
_MAX_NOTES = 65536


class _Front(Service):
    """What peers ask besides the bytes."""

    requests = m.EngineRequest

    def __init__(self, node: EngineNode) -> None:
        self._node = node

    def open_session(self) -> int:
        return 0

    def close_session(self, session: int) -> None: ...

    def handle(self, session: int, request: Any) -> m.Message:
        match request:
            case m.Describe():
                return m.Described([(r.address, r.size) for r in self._node.regions()])
            case m.Notify(name, text):
                self._node.notes.append((name, text))
        return m.Done()


class _Remote:
    """A peer: its connections for bytes and the one for words, made when they are wanted."""

    def __init__(self, address: TcpAddress, security: Security) -> None:
        self.address, self._security = address, security
        self.client = TransferClient(lambda: connect(address, security, _CONNECT_S, purpose="data"))
        self._lock = threading.Lock()
        self._channel: SocketChannel | None = None

    def call(self, request: m.Message, reply: type[Any]) -> Any:
        with self._lock:
            if self._channel is None:
                self._channel = SocketChannel(self.address, _CONNECT_S, security=self._security)
            channel = self._channel
        return channel.call(request, reply)

    def close(self) -> None:
        self.client.close()
        with self._lock:
            channel, self._channel = self._channel, None
        if channel:
            channel.close()


class EngineNode:
    """Thread-safe. Calls raise MoonpoolError."""

    def __init__(self, name: str, directory: Directory, listen: TcpAddress, security: Security) -> None:
        """Listen and publish. Raises ConfigError, ConnectionLost (no metadata server)."""
        self.name, self._directory, self._security = name, directory, security
        self.registry = Registry()
        self.notes: deque[tuple[str, str]] = deque(maxlen=_MAX_NOTES)
        """What peers said, oldest first; the oldest go when nobody listens."""
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        """By address, in the order of registration."""
        self._remotes: dict[str, _Remote] = {}
        self._closed = False
        self._transfers = TransferServer(self.registry)
        handlers = {"data": lambda sock, _: self._transfers.serve(sock)}
        self._server = Server(listen, _Front(self), security=security, handlers=handlers, name="engine")
        address = self._server.addresses[0]
        assert isinstance(address, TcpAddress)
        self.address = address
        try:
            directory.publish(name, address)
        except MoonpoolError:
            self.close()
            raise

    # -- memory of this process

    def register(self, address: int, size: int) -> None:
        """Raises ConfigError (no address), TransferError (no size), Overlap."""
        region = self.registry.register(view_at(address, size, writable=True))
        with self._lock:
            self._regions[address] = region

    def unregister(self, address: int) -> None:
        """Transfers under way end first. Raises NotRegistered."""
        with self._lock:
            region = self._regions.pop(address, None)
        if region is None:
            raise NotRegistered("no region starts here", key=f"{address:#x}")
        self.registry.unregister(region)

    def regions(self) -> list[Region]:
        with self._lock:
            return list(self._regions.values())

    # -- peers

    def remote(self, target: str) -> _Remote:
        """Raises what the directory raises."""
        with self._lock:
            if self._closed:
                raise PoolClosed("the engine is closed")
            known = self._remotes.get(target)
        if known:
            return known
        found = _Remote(self._directory.find(target), self._security)
        with self._lock:
            chosen = self._remotes.setdefault(target, found)
        if chosen is not found:
            found.close()
        return chosen

    def knows(self, target: str) -> bool:
        """Whether it was reached before."""
        with self._lock:
            return target in self._remotes

    def describe(self, target: str) -> list[tuple[int, int]]:
        """(address, size) of the target's regions; also the proof that it is there."""
        found: m.Described = self._call(target, m.Describe(), m.Described)
        return found.regions

    def notify(self, target: str, name: str, text: str) -> None:
        self._call(target, m.Notify(name, text), m.Done)

    def transfer(self, target: str, ops: Sequence[Op], timeout: float) -> None:
        """All of it, or the first error is raised."""
        remote = self.remote(target)
        results = remote.client.run(ops, timeout=timeout)
        errors = [r for r in results if isinstance(r, MoonpoolError)]
        if any(isinstance(e, ConnectionLost) for e in errors):
            self._drop(target, remote)  # it may be somewhere else when it comes back
        for error in errors:
            raise error

    def _call(self, target: str, request: m.Message, reply: type[Any]) -> Any:
        for last in (False, True):
            remote = self.remote(target)
            try:
                return remote.call(request, reply)
            except DeadlineExceeded:
                self._drop(target, remote)
                raise
            except ConnectionLost:  # perhaps only a connection of the process that was there before
                self._drop(target, remote)
                if last:
                    raise
        raise AssertionError  # the loop returns or raises

    def _drop(self, target: str, remote: _Remote) -> None:
        with self._lock:
            if self._remotes.get(target) is remote:
                del self._remotes[target]
        remote.close()

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            was, self._closed = self._closed, True
            remotes, self._remotes = self._remotes, {}
        if was:
            return
        self._directory.withdraw(self.name)
        for remote in remotes.values():
            remote.close()
        self._transfers.close()
        self._server.close()
        self.registry.close(wait_s=0)


def ops_of(kind: Any, buffers: Sequence[int], peers: Sequence[int], sizes: Sequence[int]) -> list[Op]:
    """By absolute addresses on both sides. Raises ConfigError, ValueError (lists of different lengths)."""
    return [
        Op(kind, 0, 0, peer, view_at(buffer, size, writable=kind == "read"))
        for buffer, peer, size in zip(buffers, peers, sizes, strict=True)
    ]
