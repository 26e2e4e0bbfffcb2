"""Servers of registered memory on loopback, honest ones and others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moonpool.transfer import Op, Region, Registry, TransferServer
from moonpool.transfer.stream import PlainStream


class Place:
    """A port that hands each connection to `handler`, in a thread of its own."""

    def __init__(self, handler: Callable[[socket.socket], None], port: int = 0) -> None:
        self._handler = handler
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._acceptor = threading.Thread(target=self._accept, name="test-accept")
        self._acceptor.start()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._sockets.append(sock)
            thread = threading.Thread(target=self._handle, args=(sock,), name="test-serve")
            self._threads.append(thread)
            thread.start()

    def _handle(self, sock: socket.socket) -> None:
        with sock:
            self._handler(sock)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        for sock in self._sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()


@contextmanager
def place(handler: Callable[[socket.socket], None]) -> Iterator[Place]:
    found = Place(handler)
    try:
        yield found
    finally:
        found.close()


@contextmanager
def serving(registry: Registry, *, idle_s: float = 10) -> Iterator[Place]:
    server = TransferServer(registry, idle_s=idle_s)
    found = Place(server.serve)
    try:
        yield found
    finally:
        server.close()
        found.close()


def stream(sock: socket.socket) -> PlainStream:
    """For peers of the tests' own making."""
    found = PlainStream(sock)
    found.idle_s = 10
    return found


def read(region: Region, offset: int, local: bytearray | memoryview) -> Op:
    return Op("read", region.id, region.generation, offset, memoryview(local))


def write(region: Region, offset: int, local: bytes | bytearray | memoryview) -> Op:
    return Op("write", region.id, region.generation, offset, memoryview(local))


def pattern(size: int, seed: int = 0) -> bytes:
    """Bytes that differ at every distance that a mistake could shift them by."""
    step = 1021 + 2 * seed
    block = bytes((i * step >> 3) & 255 for i in range(min(size, 1 << 16) or 1))
    return (block * (size // len(block) + 1))[:size]
