"""A conversation of frames on one socket, cheap for small messages: one system call to send and one to receive each."""

from __future__ import annotations

import os
import socket
import time

import msgspec

from moonpool.wire import framing

_HEADER = framing.HEADER.size
_KEPT = 1 << 16
"""Bytes of buffer that a quiet connection keeps; larger messages get memory of their own."""
_encode_into = msgspec.msgpack.Encoder().encode_into


class Stream:
    """Takes over `socket` and its timeouts. One thread at a time."""

    def __init__(
        self, sock: socket.socket, *, receive_s: float | None, send_s: float | None, descriptors: bool = False
    ) -> None:
        """Longest wait in seconds for a frame to come, and to go. `descriptors`: keep those that come along, in `fds`."""
        self.socket = sock
        self.fds: list[int] = []
        self._wanted = self.fds if descriptors else None
        self._in = memoryview(bytearray(_KEPT))
        self._start = self._end = 0  # of what came with the last frame and belongs to the next
        self._out = bytearray(_HEADER)
        self._receive_s, self._send_s = receive_s, send_s
        framing.set_timeout(sock, receive_s, send_s)

    def set_timeout(self, seconds: float) -> None:
        if seconds != self._receive_s:
            framing.set_timeout(self.socket, seconds, seconds)
            self._receive_s = self._send_s = seconds

    @property
    def more(self) -> bool:
        """Whether a part of the next frame has come along."""
        return self._start < self._end

    def pack(self, message: msgspec.Struct) -> bytearray:
        """The frame to `send` next. Raises FrameTooLarge."""
        out = self._out
        _encode_into(message, out, _HEADER)
        size = len(out) - _HEADER
        if size > _KEPT:
            self._out = bytearray(_HEADER)
        framing.check_size(size)
        framing.HEADER.pack_into(out, 0, framing.MAGIC, framing.VERSION, size)
        return out

    def send(self, packed: bytearray, fd: int | None = None) -> None:
        """Raises ConnectionLost, DeadlineExceeded; then the stream is of no more use."""
        framing.send_bytes(self.socket, packed, fd)

    def receive(self) -> bytes | bytearray | None:
        """The next frame's body, None at the end. Raises as `framing.receive`; the timeout is for the whole frame."""
        if self.more:
            return self._assembled()
        end = framing.receive_some(self.socket, self._in, self._wanted)
        if end == 0:
            return None
        if end >= _HEADER and framing.body_length(self._in, 0) == end - _HEADER:  # one frame: the usual case
            return bytes(self._in[_HEADER:end])
        self._start, self._end = 0, end
        return self._assembled()

    def _assembled(self) -> bytes | bytearray:
        """The next frame, of which the buffer holds a part."""
        deadline = None if self._receive_s is None else time.monotonic() + self._receive_s
        have = bytes(self._in[self._start : self._end])
        if len(have) < _HEADER:
            header = memoryview(bytearray(have.ljust(_HEADER, b"\0")))
            framing.fill(self.socket, header[len(have) :], deadline)
            have = bytes(header)
        length = framing.body_length(memoryview(have), 0)
        body, more = have[_HEADER : _HEADER + length], len(have) - _HEADER - length
        if more > 0:
            self._start = self._end - more
            return body
        self._start = self._end = 0
        whole = framing.receive_body(self.socket, body, length, deadline)
        if deadline is not None:
            framing.set_timeout(self.socket, self._receive_s, self._send_s)
        return whole

    def close(self) -> None:
        """Closes the socket, and the descriptors that nobody took. Idempotent."""
        self.socket.close()
        while self.fds:
            os.close(self.fds.pop())
