"""Frames on a stream socket: a header of 8 bytes, then the body in msgpack.

    | 0x4d50 (2) | version (2) | length of the body (4) | body ...        little-endian

Magic, version and length are checked before memory is taken for the body, and memory grows only with what arrives, so a hostile
header costs nothing.
"""

from __future__ import annotations

import array
import contextlib
import socket
import ssl
import struct
import time

from moonpool.errors import ConnectionLost, DeadlineExceeded, FrameTooLarge, ProtocolError

MAX_FRAME = 32 << 20
VERSION = 2
"""Of the messages and of the handshake. Peers of different versions refuse each other at the first frame."""
HEADER = struct.Struct("<HHI")
MAGIC = 0x4D50
_PIECE = 1 << 16
_TIMEVAL = struct.Struct("@ll")
_ROOM = socket.CMSG_SPACE(4 * array.array("i").itemsize)
"""For four descriptors; the kernel closes what is more."""


def send(sock: socket.socket, body: bytes, fd: int | None = None) -> None:
    """Send one frame, and a descriptor beside its header if given. Raises FrameTooLarge, ConnectionLost, DeadlineExceeded."""
    check_size(len(body))
    send_bytes(sock, HEADER.pack(MAGIC, VERSION, len(body)) + body, fd)


def receive(
    sock: socket.socket, fds: list[int] | None = None, *, cap: int = MAX_FRAME, deadline: float | None = None
) -> bytearray | None:
    """The next frame's body and not one byte more; None if the peer closed between frames. Descriptors that came along are
    added to `fds`.

    Raises ProtocolError (no frame of ours, or of another version), FrameTooLarge (over `cap` bytes), ConnectionLost (closed inside
    a frame), DeadlineExceeded (the socket's timeout, or `deadline` of `time.monotonic`, which changes that timeout).
    """
    header = memoryview(bytearray(HEADER.size))
    _arm(sock, deadline)
    got = receive_some(sock, header, fds)
    if got == 0:
        return None
    fill(sock, header[got:], deadline)
    return receive_body(sock, b"", body_length(header, 0, cap), deadline)


def check_size(length: int) -> None:
    if length > MAX_FRAME:
        raise FrameTooLarge(
            "message over its cap", need=f"<= {MAX_FRAME} B", have=f"{length} B", fix="Use smaller batches."
        )


def body_length(data: bytearray | memoryview, start: int, cap: int = MAX_FRAME) -> int:
    """What the header at `start` says, checked."""
    magic, version, length = HEADER.unpack_from(data, start)
    if magic != MAGIC:
        raise ProtocolError("not a Moonpool message", fix="Is something else using this socket?")
    if version != VERSION:
        raise ProtocolError("peer speaks another version", need=str(VERSION), have=str(version), fix="Run one version.")
    if length > cap:
        raise FrameTooLarge("message over its cap", need=f"<= {cap} B", have=f"{length} B")
    return int(length)


def send_bytes(sock: socket.socket, data: bytes | bytearray, fd: int | None) -> None:
    try:
        if fd is None:
            sock.sendall(data)
        else:
            sent = socket.send_fds(sock, [data], [fd])
            sock.sendall(data[sent:])
    except (TimeoutError, BlockingIOError) as e:
        raise DeadlineExceeded("peer does not read") from e
    except OSError as e:
        raise ConnectionLost(f"cannot send: {e}") from e


def receive_some(sock: socket.socket, view: memoryview, fds: list[int] | None = None) -> int:
    """What is there, at least one byte; 0 at the end."""
    try:
        return sock.recv_into(view) if fds is None else _with_fds(sock, view, fds)
    except (TimeoutError, BlockingIOError) as e:
        raise DeadlineExceeded("no answer in time") from e
    except OSError as e:
        raise ConnectionLost(f"cannot receive: {e}") from e


def fill(sock: socket.socket, view: memoryview, deadline: float | None = None) -> None:
    """Receive until `view` is full, or until `deadline` (of `time.monotonic`)."""
    while view:
        _arm(sock, deadline)
        got = receive_some(sock, view)
        if got == 0:
            raise ConnectionLost("peer closed the connection inside a message")
        view = view[got:]


def receive_body(sock: socket.socket, have: bytes, length: int, deadline: float | None = None) -> bytearray:
    """A body of `length` bytes that begins with `have`. Memory doubles with what has come."""
    body, got = bytearray(have), len(have)
    while got < length:
        size = min(length, max(2 * got, _PIECE))
        body.extend(bytes(size - got))
        with memoryview(body) as view:
            fill(sock, view[got:], deadline)
        got = size
    return body


def set_timeout(sock: socket.socket, receive: float | None, send: float | None) -> None:
    """Longest wait of one system call on `sock`, in seconds; None = for ever. The kernel keeps the time where it can: Python's own
    timeouts cost one more system call for each, a tenth of a round trip."""
    if isinstance(sock, ssl.SSLSocket):  # knows only Python's
        sock.settimeout(receive)
        return
    try:
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(receive))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send))
    except OSError as e:
        raise ConnectionLost(f"the connection is closed: {e}") from e


def _timeval(seconds: float | None) -> bytes:
    micros = 0 if seconds is None else max(1, round(seconds * 1e6))  # 0 means for ever to the kernel
    return _TIMEVAL.pack(*divmod(micros, 1_000_000))


def hang_up(sock: socket.socket) -> None:
    """End the connection for both sides; wakes a thread that waits on it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not TLS's own, which another thread may be using


def _arm(sock: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("no whole message in time")
    set_timeout(sock, left, left)


def _with_fds(sock: socket.socket, view: memoryview, fds: list[int]) -> int:
    count, ancillary, _, _ = sock.recvmsg_into([view], _ROOM, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found = array.array("i")
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
            fds.extend(found)
    return count
