"""Frames on a stream socket: a little-endian length of 4 bytes, then that many bytes of msgpack.

The length is checked before memory is taken for the body, so a hostile header costs nothing.
"""

from __future__ import annotations

import array
import socket
import struct

from moonpool.errors import ConnectionLost, DeadlineExceeded, FrameTooLarge

MAX_FRAME = 32 << 20
_HEADER = struct.Struct("<I")


def send(sock: socket.socket, body: bytes, fd: int | None = None) -> None:
    """Send one frame, and a descriptor beside its header if given. Raises FrameTooLarge, ConnectionLost, DeadlineExceeded."""
    if len(body) > MAX_FRAME:
        raise FrameTooLarge(
            "message over its cap", need=f"<= {MAX_FRAME} B", have=f"{len(body)} B", fix="Use smaller batches."
        )
    frame = _HEADER.pack(len(body)) + body
    try:
        if fd is not None:
            sent = socket.send_fds(sock, [frame], [fd])
            frame = frame[sent:]
        sock.sendall(frame)
    except TimeoutError as e:
        raise DeadlineExceeded("peer does not read") from e
    except OSError as e:
        raise ConnectionLost(f"cannot send: {e}") from e


def receive(sock: socket.socket, fds: list[int] | None = None) -> bytes | None:
    """The next frame's body; None if the peer closed between frames. Descriptors that came along are added to `fds`.

    Raises FrameTooLarge, ConnectionLost (closed inside a frame), DeadlineExceeded (the socket's timeout).
    """
    header = _exactly(sock, _HEADER.size, fds, may_end=True)
    if header is None:
        return None
    (length,) = _HEADER.unpack(header)
    if length > MAX_FRAME:
        raise FrameTooLarge("message over its cap", need=f"<= {MAX_FRAME} B", have=f"{length} B")
    body = _exactly(sock, length, None, may_end=False)
    assert body is not None
    return bytes(body)


def _exactly(sock: socket.socket, size: int, fds: list[int] | None, *, may_end: bool) -> bytearray | None:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        try:
            count = _with_fds(sock, view[got:], fds) if fds is not None else sock.recv_into(view[got:])
        except TimeoutError as e:
            raise DeadlineExceeded("no answer in time") from e
        except OSError as e:
            raise ConnectionLost(f"cannot receive: {e}") from e
        if count == 0:
            if may_end and got == 0:
                return None
            raise ConnectionLost("peer closed the connection inside a message")
        got += count
    return data


def _with_fds(sock: socket.socket, view: memoryview, fds: list[int]) -> int:
    room = socket.CMSG_SPACE(4 * array.array("i").itemsize)
    count, ancillary, _, _ = sock.recvmsg_into([view], room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found = array.array("i")
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
            fds.extend(found)
    return count
