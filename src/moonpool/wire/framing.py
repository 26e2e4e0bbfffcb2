"""Frames on a stream socket: a header of 8 bytes, then the body in msgpack.

    | 0x4d50 (2) | version (2) | length of the body (4) | body ...        little-endian

Magic, version and length are checked before memory is taken for the body, and memory grows only with what arrives, so a hostile
header costs nothing.
"""

from __future__ import annotations

import array
import socket
import struct

from moonpool.errors import ConnectionLost, DeadlineExceeded, FrameTooLarge, ProtocolError

MAX_FRAME = 32 << 20
VERSION = 1
"""Of the messages. Peers of different versions refuse each other at the first frame."""
_MAGIC = 0x4D50
_HEADER = struct.Struct("<HHI")
_PIECE = 1 << 20


def send(sock: socket.socket, body: bytes, fd: int | None = None) -> None:
    """Send one frame, and a descriptor beside its header if given. Raises FrameTooLarge, ConnectionLost, DeadlineExceeded."""
    if len(body) > MAX_FRAME:
        raise FrameTooLarge(
            "message over its cap", need=f"<= {MAX_FRAME} B", have=f"{len(body)} B", fix="Use smaller batches."
        )
    frame = _HEADER.pack(_MAGIC, VERSION, len(body)) + body
    try:
        if fd is not None:
            sent = socket.send_fds(sock, [frame], [fd])
            frame = frame[sent:]
        sock.sendall(frame)
    except TimeoutError as e:
        raise DeadlineExceeded("peer does not read") from e
    except OSError as e:
        raise ConnectionLost(f"cannot send: {e}") from e


def receive(sock: socket.socket, fds: list[int] | None = None) -> bytearray | None:
    """The next frame's body; None if the peer closed between frames. Descriptors that came along are added to `fds`.

    Raises ProtocolError (no frame of ours, or of another version), FrameTooLarge, ConnectionLost (closed inside a frame),
    DeadlineExceeded (the socket's timeout).
    """
    header = _exactly(sock, _HEADER.size, fds)
    if header is None:
        return None
    length = _body_length(header)
    body = bytearray()
    while len(body) < length:
        piece = _exactly(sock, min(length - len(body), _PIECE))
        if piece is None:
            raise ConnectionLost("peer closed the connection inside a message")
        body += piece
    return body


def _body_length(header: bytearray) -> int:
    magic, version, length = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise ProtocolError("not a Moonpool message", fix="Is something else using this socket?")
    if version != VERSION:
        raise ProtocolError("peer speaks another version", need=str(VERSION), have=str(version), fix="Run one version.")
    if length > MAX_FRAME:
        raise FrameTooLarge("message over its cap", need=f"<= {MAX_FRAME} B", have=f"{length} B")
    return int(length)


def _exactly(sock: socket.socket, size: int, fds: list[int] | None = None) -> bytearray | None:
    """`size` bytes; None if the peer closed before the first of them."""
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
            if got == 0:
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
