"""Peers that are late, wrong or hostile."""

from __future__ import annotations

import resource
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonpool.errors import ChecksumMismatch, ConnectionLost, DeadlineExceeded, ProtocolError
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.transfer import Registry, TransferClient, frames
from moonpool.transfer.frames import HEADER, Kind, Status
from moonpool.transfer.registry import Region, Span
from tests.transfer.support import pattern, place, read, serving, stream, write

REGION = Region(1, 1, 0, 1 << 20, memoryview(b""))
"""Of a peer that is not honest, so what it is called does not matter."""


def test_a_peer_that_never_answers_costs_the_deadline_and_its_late_bytes_land_nowhere() -> None:
    late = threading.Event()
    outcome: list[bool] = []

    def slow(sock: socket.socket) -> None:
        request = bytearray(HEADER.size + 32)
        stream(sock).receive([memoryview(request)])
        late.wait(10)
        table = frames.results_table([(Status.OK, 64)])
        try:
            sock.sendall(frames.header(Kind.DONE, False, 1, 64) + table + b"!" * 64)
            outcome.append(sock.recv(1) == b"")
        except OSError:
            outcome.append(True)  # reset: the other end is gone

    with no_leaks(), place(slow) as there, TransferClient(there.connect) as client:
        local = bytearray(b"?" * 64)
        start = time.monotonic()
        (result,) = client.run([read(REGION, 0, local)], timeout=0.3)
        assert isinstance(result, DeadlineExceeded)
        assert 0.3 <= time.monotonic() - start < 5
        late.set()
        assert eventually(lambda: outcome == [True])
        assert local == b"?" * 64


def test_the_deadline_is_for_the_whole_batch_also_while_bytes_trickle() -> None:
    def trickle(sock: socket.socket) -> None:
        stream(sock).receive([memoryview(bytearray(HEADER.size + 32))])
        try:
            sock.sendall(frames.header(Kind.DONE, False, 1, 1000) + frames.results_table([(Status.OK, 1000)]))
            while True:
                sock.sendall(b".")
                time.sleep(0.01)  # the fault itself
        except OSError:
            pass

    with no_leaks(), place(trickle) as there, TransferClient(there.connect) as client:
        start = time.monotonic()
        (result,) = client.run([read(REGION, 0, bytearray(1000))], timeout=0.3)
        assert isinstance(result, DeadlineExceeded)
        assert time.monotonic() - start < 5


def holding(done: threading.Event) -> Callable[[socket.socket], None]:
    """A peer that accepts and does nothing."""

    def handler(_: socket.socket) -> None:
        done.wait(10)

    return handler


def test_a_peer_that_does_not_read_costs_the_deadline() -> None:
    done = threading.Event()
    with no_leaks(), place(holding(done)) as there, TransferClient(there.connect) as client:
        (result,) = client.run([write(REGION, 0, bytes(64 << 20))], timeout=0.3)
        assert isinstance(result, DeadlineExceeded)
        done.set()


def test_connections_of_others_are_waited_for_no_longer_than_the_deadline() -> None:
    done = threading.Event()
    with (
        no_leaks(),
        place(holding(done)) as there,
        TransferClient(there.connect, streams=1) as client,
    ):
        first = threading.Thread(target=client.run, args=([read(REGION, 0, bytearray(8))],), kwargs={"timeout": 5})
        first.start()
        assert eventually(lambda: bool(client._links._busy))
        (result,) = client.run([read(REGION, 0, bytearray(8))], timeout=0.2)
        assert isinstance(result, DeadlineExceeded)
        assert there.connections == 1
        client.close()
        first.join()
        done.set()


def answering(answer: Callable[[int], bytes], spans: int = 1) -> Callable[[socket.socket], None]:
    """A peer that reads a request of `spans` spans and says `answer(its number)`."""

    def handler(sock: socket.socket) -> None:
        for number in range(100):
            try:
                stream(sock).receive([memoryview(bytearray(HEADER.size + 32 * spans))])
            except ConnectionLost:
                return
            sock.sendall(answer(number))

    return handler


@pytest.mark.parametrize(
    ("claimed", "sent", "good"), [(0, 0, False), (63, 63, False), (64, 64, True), (65, 65, False), (64, 0, False)]
)
def test_only_exactly_all_bytes_is_success(claimed: int, sent: int, good: bool) -> None:
    reply = frames.header(Kind.DONE, False, 1, sent) + frames.results_table([(Status.OK, claimed)]) + b"x" * sent
    with place(answering(lambda _: reply)) as there, TransferClient(there.connect) as client:
        arena = bytearray(b"?" * 100)
        (result,) = client.run([read(REGION, 0, memoryview(arena)[:64])], timeout=5)
        assert (result == 64) is good
        assert good or isinstance(result, ProtocolError)
        assert arena[64:] == b"?" * 36


def test_an_answer_that_ends_early_is_an_error() -> None:
    def cut(sock: socket.socket) -> None:
        stream(sock).receive([memoryview(bytearray(HEADER.size + 32))])
        sock.sendall(frames.header(Kind.DONE, False, 1, 64) + frames.results_table([(Status.OK, 64)]) + b"x" * 63)

    with place(cut) as there, TransferClient(there.connect) as client:
        (result,) = client.run([read(REGION, 0, bytearray(64))], timeout=5)
        assert isinstance(result, ConnectionLost)


def header(
    magic: int = 0x544D, version: int = 1, kind: int = 3, flags: int = 0, count: int = 1, zero: int = 0, total: int = 64
) -> bytes:
    return HEADER.pack(magic, version, kind, flags, count, zero, total)


BAD_ANSWERS = {
    "magic": header(magic=1),
    "version": header(version=2),
    "kind": header(kind=9),
    "a request": header(kind=1),
    "flags": header(flags=8),
    "checksums nobody asked for": header(flags=1),
    "reserved": header(zero=1),
    "count": header(count=2),
    "too many": header(count=frames.MAX_OPS + 1),
    "too large": header(total=frames.MAX_BYTES + 1),
    "total": header(total=63) + frames.results_table([(Status.OK, 64)]),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_a_nonsensical_answer_is_a_typed_error_and_ends_the_connection(name: str) -> None:
    with place(answering(lambda _: BAD_ANSWERS[name] + b"x" * 500)) as there, TransferClient(there.connect) as client:
        local = bytearray(b"?" * 64)
        for expected in (1, 2):
            (result,) = client.run([read(REGION, 0, local)], timeout=5)
            assert not isinstance(result, int)
            assert type(result).__name__ in ("ProtocolError", "FrameTooLarge")
            assert there.connections == expected
        assert local == b"?" * 64


def test_an_unknown_status_is_an_error_of_that_op_only() -> None:
    reply = frames.header(Kind.DONE, False, 2, 4) + struct.pack("<4Q", 77, 0, 0, 4) + b"good"
    with place(answering(lambda _: reply, spans=2)) as there, TransferClient(there.connect) as client:
        local = bytearray(4)
        bad, good = client.run([read(REGION, 0, bytearray(4)), read(REGION, 4, local)], timeout=5)
        assert isinstance(bad, ProtocolError)
        assert good == 4
        assert local == b"good"


class Corrupter:
    """Between client and server; changes one byte of the payload in one direction."""

    def __init__(self, target: Callable[[], socket.socket], *, answers: bool, at: int) -> None:
        self._target, self._answers, self._at = target, answers, at

    def __call__(self, sock: socket.socket) -> None:
        with self._target() as other:
            back = threading.Thread(target=self._pump, args=(other, sock, self._answers))
            back.start()
            self._pump(sock, other, not self._answers)
            back.join()

    def _pump(self, source: socket.socket, target: socket.socket, change: bool) -> None:
        seen = 0
        try:
            while data := bytearray(source.recv(4096)):
                if change and seen <= self._at < seen + len(data):
                    data[self._at - seen] ^= 1
                seen += len(data)
                target.sendall(data)
        except OSError:
            pass
        try:
            target.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_flipped_bit_is_noticed_with_checksums_and_only_with_them(kind: str) -> None:
    registry = Registry()
    arena = bytearray(pattern(10000))
    region = registry.register(arena)
    table = HEADER.size + 2 * (16 if kind == "read" else 32)
    with serving(registry) as honest:
        for checksum in (True, False):
            corrupter = Corrupter(honest.connect, answers=kind == "read", at=table + 1000 + 500)
            with place(corrupter) as there, TransferClient(there.connect) as client:
                first, second = bytearray(1000), bytearray(1000)
                make = read if kind == "read" else write
                good, bad = client.run(
                    [make(region, 0, first), make(region, 5000, second)], timeout=5, checksum=checksum
                )
                assert good == 1000
                assert isinstance(bad, ChecksumMismatch) is checksum
                local = second if kind == "read" else arena[5000:6000]
                assert local != (pattern(10000)[5000:6000] if kind == "read" else bytes(1000))
    registry.close()


HOSTILE = {
    "garbage": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100),
    "a reply": header(),
    "too many ops": header(kind=1, count=(1 << 32) - 1),
    "too many bytes": header(kind=2, total=(1 << 64) - 1),
    "sizes that do not add up": header(kind=2, total=64) + struct.pack("<4Q", 1, 1, 0, 63),
    "a size that wraps": header(kind=2, total=0) + struct.pack("<4Q", 1, 1, 0, 1 << 63),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_ends_its_connection_and_takes_no_memory(name: str) -> None:
    registry = Registry()
    arena = bytearray(4096)
    region = registry.register(arena)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with no_leaks(), serving(registry) as there:
        with there.connect() as sock:
            sock.sendall(HOSTILE[name])
            assert hung_up(sock)
        with TransferClient(there.connect) as client:
            assert client.run([read(region, 0, bytearray(16))], timeout=5) == [16]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10
    assert arena == bytes(4096)
    registry.close()


def hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_spans_outside_every_region_write_nothing() -> None:
    registry = Registry()
    arena = bytearray(4096)
    region = registry.register(memoryview(arena)[1024:2048])
    far = [-1, -1024, 1023, 1024, 1 << 40, (1 << 64) - 8]
    with serving(registry) as there, TransferClient(there.connect) as client:
        for offset in far:
            (refused,) = client.run([write(region, offset % (1 << 64), b"x" * 8)], timeout=5)
            assert not isinstance(refused, int)
    assert arena == bytes(4096)
    registry.close()


def test_a_peer_that_falls_silent_inside_a_frame_is_given_up() -> None:
    registry = Registry()
    region = registry.register(bytearray(4096))
    with no_leaks(), serving(registry, idle_s=0.2) as there, there.connect() as sock:
        span = Span(region.id, region.generation, 0, 4096)
        sock.sendall(frames.header(Kind.WRITE, False, 1, 4096) + frames.spans_table([span]) + b"x" * 100)
        assert hung_up(sock)
        registry.unregister(region)


def test_a_connection_at_rest_is_kept() -> None:
    registry = Registry()
    region = registry.register(bytearray(4096))
    with serving(registry, idle_s=0.05) as there, TransferClient(there.connect) as client:
        assert client.run([read(region, 0, bytearray(8))], timeout=5) == [8]
        time.sleep(0.2)  # longer than a silence inside a frame may be
        assert client.run([read(region, 0, bytearray(8))], timeout=5) == [8]
        assert there.connections == 1
    registry.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.binary(max_size=200), st.sampled_from(sorted(HOSTILE.values()))), max_size=4))
def test_no_bytes_of_a_stranger_hurt_the_server(pieces: list[bytes]) -> None:
    registry = Registry()
    arena = bytearray(4096)
    region = registry.register(arena)
    with serving(registry, idle_s=1) as there:
        with there.connect() as sock:
            try:
                for piece in pieces:
                    sock.sendall(piece)
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass
        with TransferClient(there.connect) as client:
            assert client.run([read(region, 0, bytearray(16))], timeout=5) == [16]
    assert arena == bytes(4096)
    registry.close()
