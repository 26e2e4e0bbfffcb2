"""Hostile bytes on each kind of socket: the server answers with a typed error or not at all, takes little memory, and lives."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moonpool.errors import MoonpoolError
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.wire import framing, rpc
from moonpool.wire import messages as m
from moonpool.wire.auth import Security
from moonpool.wire.dial import connect
from moonpool.wire.handshake import MAX_HANDSHAKE, Challenge, Open
from tests import hostile
from tests.unit.wire.services import Fake

SECRET = Security(b"canary-secret-0123456789", b"canary-admin-9876543210")
OPENED = hostile.frame(msgspec.msgpack.encode(Open("rpc", "data", None)))
SECURITY = {"open": Security(), "secret": SECRET}
few = settings(max_examples=150, deadline=None)


class Served:
    def __init__(self, server: rpc.Server, service: Fake, security: Security) -> None:
        self.server, self.service, self.security = server, service, security

    def lives(self) -> bool:
        """Good clients are served at every address, and the bad ones' sessions are gone."""
        for address in self.server.addresses:
            channel = rpc.SocketChannel(address, 10, security=self.security)
            assert channel.call(m.Locate(["a"]), m.Located) == m.Located([["a"]])
            channel.close()
        return eventually(lambda: not self.service.open)


@pytest.fixture(scope="module", params=["open", "secret"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with no_leaks():
        service, security = Fake(), SECURITY[request.param]
        service.hold.set()
        path = str(tmp_path_factory.mktemp("fuzz") / "s")
        server = rpc.Server([path, "127.0.0.1:0"], service, security=security)
        before = hostile.resident()
        yield Served(server, service, security)
        assert hostile.resident() - before < 64 * hostile.MIB  # hypothesis's own notes are in it
        server.close()
        assert not service.open


def messages_in(heard: bytes) -> list[object]:
    """All frames; fails if it is not frames only."""
    found: list[object] = []
    while heard:
        length = framing.body_length(memoryview(heard), 0)
        body, heard = heard[8 : 8 + length], heard[8 + length :]
        found.append(msgspec.msgpack.decode(body))
        assert len(body) == length
    return found


@few
@given(data=hostile.streams, which=st.integers(0, 1))
def test_a_stranger_gets_a_refusal_and_nothing_else(served: Served, data: bytes, which: int) -> None:
    opened = served.service.opened
    heard = hostile.send_and_hear(served.server.addresses[which], data)
    if served.security.secret:
        assert len(heard) <= 2 * MAX_HANDSHAKE
        assert {said[0] for said in messages_in(heard)} <= {"Challenge", "Error"}  # type: ignore[index]
        assert served.service.opened == opened
    assert served.lives()


@few
@given(data=hostile.streams, which=st.integers(0, 1))
def test_a_guest_who_misbehaves_is_shown_out(served: Served, data: bytes, which: int) -> None:
    """The same, from a client that is let in."""
    with connect(served.server.addresses[which], served.security, 10) as sock:
        heard = hostile.converse(sock, data)
    answers = messages_in(heard)
    assert len(answers) <= 5  # one for each frame at the most, and one to say good-bye
    assert all(isinstance(answer, list) for answer in answers)
    assert served.lives()


@few
@given(data=hostile.bodies | hostile.frames)
def test_a_client_survives_any_server(data: bytes) -> None:
    """Whatever comes back as a reply is a MoonpoolError, and later calls fail as well or work: never the wrong answer."""
    assume(b"Registered" not in data)
    with socket.create_server(("127.0.0.1", 0)) as fake:
        port = fake.getsockname()[1]

        def answer() -> None:
            connection, _ = fake.accept()
            with connection:
                framing.receive(connection)
                framing.send(connection, msgspec.msgpack.encode(["Accepted", None]))
                framing.receive(connection)
                connection.sendall(data)

        thread = threading.Thread(target=answer)
        thread.start()
        channel = rpc.SocketChannel(f"127.0.0.1:{port}", 10)
        for _ in range(2):
            with pytest.raises(MoonpoolError):
                channel.call(m.Locate(["a"]), m.Registered)
        channel.close()
        thread.join()


@few
@given(data=hostile.streams)
def test_a_client_survives_any_handshake(data: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def answer() -> None:
            connection, _ = fake.accept()
            with connection:
                framing.receive(connection)
                connection.sendall(data)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(MoonpoolError):
            connect(f"127.0.0.1:{fake.getsockname()[1]}", SECRET, 10)
        thread.join()


def test_claims_take_no_memory(served: Served) -> None:
    """Many clients at once that promise much and send little."""
    socks = [connect(served.server.addresses[1], served.security, 10) for _ in range(50)]
    tracemalloc.start()
    try:
        for sock in socks:
            sock.sendall(hostile.frame(b"x" * 10_000, length=framing.MAX_FRAME))
        for sock in socks:
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(100) == b""
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        for sock in socks:
            sock.close()
    assert peak < 50 * 0.3 * hostile.MIB
    assert served.lives()


def test_a_full_frame_of_nonsense_takes_little_more_than_itself(served: Served) -> None:
    """Small things in large number are refused before each becomes an object."""
    count = framing.MAX_FRAME - 100
    for item in (b"\xc0", b"\x01", b"\xa1a", b"\x90"):
        many = count // len(item)
        body = b"\x92\xa6Locate\xdd" + many.to_bytes(4, "big") + item * many
        with connect(served.server.addresses[1], served.security, 10) as sock:
            tracemalloc.start()
            try:
                sock.sendall(hostile.frame(body))
                assert messages_in(sock.recv(1000))[0][0] == "Error"  # type: ignore[index]
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        assert peak < 4 * framing.MAX_FRAME
    assert served.lives()


def test_descriptors_that_a_client_sends_are_closed(served: Served) -> None:
    with no_leaks(), connect(served.server.addresses[0], served.security, 10) as sock:
        for _ in range(20):
            socket.send_fds(sock, [hostile.frame(msgspec.msgpack.encode(m.Locate(["a"])))], [sock.fileno()] * 8)
            assert messages_in(sock.recv(1000)) == [["Located", [["a"]]]]


def test_the_handshakes_names_are_all_fuzzed() -> None:
    assert {Open.__name__, Challenge.__name__} <= set(hostile.NAMES)
    assert {"Locate", "Exist", "Error"} <= set(hostile.NAMES)
