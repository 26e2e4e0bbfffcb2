"""Frames over a socket pair: whole, split, hostile."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import pytest

from moonpool.errors import ConnectionLost, DeadlineExceeded, FrameTooLarge, ProtocolError
from moonpool.wire import framing

Pair = tuple[socket.socket, socket.socket]


def received(sock: socket.socket, fds: list[int] | None = None) -> bytes | None:
    body = framing.receive(sock, fds)
    return None if body is None else bytes(body)


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = socket.socketpair()
    a.settimeout(2)
    b.settimeout(2)
    with a, b:
        yield a, b


def test_frames_come_back_whole_and_in_order(pair: Pair) -> None:
    for body in (b"", b"one", bytes(100_000)):
        framing.send(pair[0], body)
        assert received(pair[1]) == body


def test_a_frame_may_come_byte_by_byte(pair: Pair) -> None:
    frame = struct.pack("<HHI", 0x4D50, framing.VERSION, 3) + b"abc"
    for i in range(len(frame)):
        pair[0].sendall(frame[i : i + 1])
    assert received(pair[1]) == b"abc"


def test_the_end_between_frames_is_no_error(pair: Pair) -> None:
    pair[0].close()
    assert framing.receive(pair[1]) is None


@pytest.mark.parametrize("cut", [1, 7, 8, 10])
def test_the_end_inside_a_frame_is_one(pair: Pair, cut: int) -> None:
    pair[0].sendall((struct.pack("<HHI", 0x4D50, framing.VERSION, 3) + b"abc")[:cut])
    pair[0].close()
    with pytest.raises(ConnectionLost):
        framing.receive(pair[1])


@pytest.mark.parametrize(
    ("header", "error"),
    [
        (struct.pack("<HHI", 0x4D50, framing.VERSION, framing.MAX_FRAME + 1), FrameTooLarge),
        (struct.pack("<HHI", 0x4D50, framing.VERSION, 0xFFFFFFFF), FrameTooLarge),
        (struct.pack("<HHI", 0x4D50, framing.VERSION + 1, 1), ProtocolError),
        (b"GET / HT", ProtocolError),
        (bytes(8), ProtocolError),
    ],
)
def test_hostile_headers_are_refused_before_the_body(pair: Pair, header: bytes, error: type[Exception]) -> None:
    pair[0].sendall(header)
    with pytest.raises(error):
        framing.receive(pair[1])


def test_too_large_is_refused_before_it_is_sent(pair: Pair) -> None:
    with pytest.raises(FrameTooLarge):
        framing.send(pair[0], bytes(framing.MAX_FRAME + 1))
    framing.send(pair[0], b"next")
    assert received(pair[1]) == b"next"


def test_silence_ends_at_the_deadline(pair: Pair) -> None:
    pair[1].settimeout(0.01)
    with pytest.raises(DeadlineExceeded):
        framing.receive(pair[1])


def test_a_descriptor_travels_beside_its_frame(pair: Pair) -> None:
    r, w = os.pipe()
    framing.send(pair[0], b"x", w)
    os.close(w)
    fds: list[int] = []
    assert received(pair[1], fds) == b"x"
    os.write(fds[0], b"through")
    assert os.read(r, 7) == b"through"
    for fd in (r, *fds):
        os.close(fd)
