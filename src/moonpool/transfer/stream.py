"""Moving lists of buffers over one stream socket, each byte once, every wait bounded.

A plain socket stays in blocking mode, with the kernel's own timeouts: one system call then moves many buffers. A TLS socket
knows neither scatter/gather nor sendfile; it gets simple calls.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Protocol

from moonpool.errors import ConnectionLost, DeadlineExceeded
from moonpool.transfer.splice import PagePipe

_IOV_MAX = 1024
_SLACK_S = 0.1
_RESET = struct.pack("ii", 1, 0)
_SEND_PIECE = 1 << 20
_SPLICE_FROM = 64 << 10
"""Bytes; below this a copy is cheaper than two system calls."""


class Stream(Protocol):
    deadline: float
    """`time.monotonic()` after which every call raises DeadlineExceeded."""
    idle_s: float
    """How long a call waits without a byte moving."""

    def send(self, parts: Sequence[memoryview | bytes], *, more: bool = False) -> None:
        """All bytes of all parts. `more`: others follow at once. Raises ConnectionLost, DeadlineExceeded."""

    def send_unchanging(self, parts: Sequence[memoryview | bytes]) -> None:
        """As `send`, perhaps without a copy: the bytes must stay as they are until the peer has answered."""

    def send_file(self, fd: int, offset: int, size: int, view: memoryview) -> None:
        """`size` bytes of a file; `view` shows the same bytes."""

    def receive(self, parts: Sequence[memoryview]) -> None:
        """Fill all parts. Raises ConnectionLost also when the peer closes before the last byte."""

    def next_header(self, header: memoryview) -> bool:
        """Fill `header`, waiting without end for its first byte. False if the peer closed instead."""

    def stale(self) -> bool:
        """Of a connection at rest: the peer closed it, or sent what nobody asked for."""

    def cancel(self) -> None:
        """From any thread: all calls end now."""

    def close(self) -> None:
        """Drop what was not sent yet, so that no late byte reaches the peer."""


def stream_of(sock: socket.socket) -> Stream:
    """Takes the socket over."""
    return TlsStream(sock) if isinstance(sock, ssl.SSLSocket) else PlainStream(sock)


class _Base:
    _unexpected = select.POLLRDHUP

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.deadline = float("inf")
        self.idle_s = float("inf")
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _patience(self) -> float:
        """Seconds for the next system call."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the transfer took too long")
        return min(left, self.idle_s)

    def stale(self) -> bool:
        poll = select.poll()
        poll.register(self._sock, self._unexpected)
        return bool(poll.poll(0))

    def cancel(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is not connected any more, which is what was wanted

    def close(self) -> None:
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        except OSError:
            pass  # closed already
        self._sock.close()


class PlainStream(_Base):
    """TCP or Unix, in the clear."""

    _unexpected = select.POLLRDHUP | select.POLLIN

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.settimeout(None)
        self._pipe: PagePipe | None = None
        self._limits: dict[int, float] = {}
        """What the kernel was told, in seconds, by option."""

    def send(self, parts: Sequence[memoryview | bytes], *, more: bool = False) -> None:
        queue = _Queue(parts)
        flags = socket.MSG_MORE if more else 0
        while window := queue.window():
            self._limit(socket.SO_SNDTIMEO)
            try:
                queue.moved(self._sock.sendmsg(window, (), flags))
            except BlockingIOError as e:
                raise DeadlineExceeded("the peer does not read") from e
            except OSError as e:
                raise ConnectionLost(f"cannot send: {e.strerror or e}") from e

    def send_unchanging(self, parts: Sequence[memoryview | bytes]) -> None:
        copied: list[memoryview | bytes] = []
        for part in parts:
            if len(part) < _SPLICE_FROM:
                copied.append(part)
                continue
            self.send(copied, more=True)
            copied = [memoryview(part)[self._splice(memoryview(part)) :]]
        self.send(copied)

    def _splice(self, view: memoryview) -> int:
        """Bytes that were sent; the rest cannot go this way."""
        try:
            self._pipe = self._pipe or PagePipe()
            return self._pipe.send(self._sock.fileno(), view, lambda: self._limit(socket.SO_SNDTIMEO))
        except BlockingIOError as e:
            raise DeadlineExceeded("the peer does not read") from e
        except OSError as e:
            raise ConnectionLost(f"cannot send: {e.strerror or e}") from e

    def close(self) -> None:
        super().close()
        pipe, self._pipe = self._pipe, None
        if pipe:
            pipe.close()

    def send_file(self, fd: int, offset: int, size: int, view: memoryview) -> None:
        end = offset + size
        while offset < end:
            self._limit(socket.SO_SNDTIMEO)
            try:
                count = os.sendfile(self._sock.fileno(), fd, offset, end - offset)
            except BlockingIOError as e:
                raise DeadlineExceeded("the peer does not read") from e
            except OSError as e:
                raise ConnectionLost(f"cannot send: {e.strerror or e}") from e
            if count == 0:
                raise ConnectionLost("the region's file is shorter than the region")
            offset += count

    def receive(self, parts: Sequence[memoryview]) -> None:
        queue = _Queue(parts)
        while window := queue.window():
            self._limit(socket.SO_RCVTIMEO)
            queue.moved(self._receive(window))

    def next_header(self, header: memoryview) -> bool:
        self._limits[socket.SO_RCVTIMEO] = float("inf")
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(float("inf")))
        try:
            count = self._sock.recv_into(header)
        except OSError as e:
            raise ConnectionLost(f"cannot receive: {e.strerror or e}") from e
        if count and count < len(header):
            self.receive([header[count:]])
        return count > 0

    def _receive(self, window: list[memoryview]) -> int:
        try:
            if len(window) == 1:
                count = self._sock.recv_into(window[0], 0, socket.MSG_WAITALL)
            else:
                count = self._sock.recvmsg_into(window, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError as e:
            raise DeadlineExceeded("the peer sends nothing") from e
        except OSError as e:
            raise ConnectionLost(f"cannot receive: {e.strerror or e}") from e
        if count == 0:
            raise ConnectionLost("the peer closed the connection inside a transfer")
        return count

    def _limit(self, option: int) -> None:
        """Tell the kernel how long it may wait. What it knows already may be too long by _SLACK_S, which saves most calls."""
        patience = self._patience()
        if not patience <= self._limits.get(option, 0.0) <= patience + _SLACK_S:
            self._limits[option] = patience + _SLACK_S / 2
            self._sock.setsockopt(socket.SOL_SOCKET, option, _timeval(self._limits[option]))


class TlsStream(_Base):
    """Everything is copied, through the cipher."""

    def send_unchanging(self, parts: Sequence[memoryview | bytes]) -> None:
        self.send(parts)

    def send(self, parts: Sequence[memoryview | bytes], *, more: bool = False) -> None:
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), _SEND_PIECE):
                self._send(view[start : start + _SEND_PIECE])

    def _send(self, view: memoryview) -> None:
        self._sock.settimeout(self._patience_or_none())
        try:
            self._sock.sendall(view)
        except TimeoutError as e:
            raise DeadlineExceeded("the peer does not read") from e
        except OSError as e:
            raise ConnectionLost(f"cannot send: {e.strerror or e}") from e

    def send_file(self, fd: int, offset: int, size: int, view: memoryview) -> None:
        self.send([view])

    def receive(self, parts: Sequence[memoryview]) -> None:
        for part in parts:
            got = 0
            while got < len(part):
                self._sock.settimeout(self._patience_or_none())
                count = self._receive(part[got:])
                if count == 0:
                    raise ConnectionLost("the peer closed the connection inside a transfer")
                got += count

    def next_header(self, header: memoryview) -> bool:
        self._sock.settimeout(None)
        count = self._receive(header)
        if count and count < len(header):
            self.receive([header[count:]])
        return count > 0

    def _receive(self, view: memoryview) -> int:
        try:
            return self._sock.recv_into(view)
        except TimeoutError as e:
            raise DeadlineExceeded("the peer sends nothing") from e
        except OSError as e:
            raise ConnectionLost(f"cannot receive: {e.strerror or e}") from e

    def _patience_or_none(self) -> float | None:
        patience = self._patience()
        return None if patience == float("inf") else patience


class _Queue:
    """Buffers that are still to be moved, front first."""

    def __init__(self, parts: Sequence[memoryview | bytes]) -> None:
        self._parts = [memoryview(p) for p in parts if len(p)]
        self._first = 0

    def window(self) -> list[memoryview]:
        """What the next system call gets; empty at the end."""
        return self._parts[self._first : self._first + _IOV_MAX]

    def moved(self, count: int) -> None:
        while count and count >= len(self._parts[self._first]):
            count -= len(self._parts[self._first])
            self._first += 1
        if count:
            self._parts[self._first] = self._parts[self._first][count:]


def _timeval(seconds: float) -> bytes:
    """0 means without end to the kernel, so a positive time is at least a millisecond."""
    if seconds == float("inf"):
        return struct.pack("ll", 0, 0)
    whole = max(int(seconds * 1e6), 1000)
    return struct.pack("ll", whole // 1_000_000, whole % 1_000_000)
