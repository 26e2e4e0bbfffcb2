"""Server and channels with a service of three verbs."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from moonpool.errors import (
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    MoonpoolError,
    NotFound,
    PoolClosed,
    ProtocolError,
)
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.wire import framing, rpc
from moonpool.wire import messages as m
from moonpool.wire.dial import connect
from tests.unit.wire.services import Fake

OVERSIZED = struct.pack("<HHI", 0x4D50, framing.VERSION, 1 << 31)
OTHER_VERSION = struct.pack("<HHI", 0x4D50, 99, 4) + b"abcd"
GARBAGE = struct.pack("<HHI", 0x4D50, framing.VERSION, 4) + b"\xc1\xc1\xc1\xc1"
NO_SUCH_MESSAGE = msgspec.msgpack.encode(["Nonsense", 1])


@pytest.fixture
def service() -> Fake:
    return Fake()


@pytest.fixture
def server(service: Fake, tmp_path: Path) -> Iterator[rpc.Server]:
    with no_leaks():
        server = rpc.Server(str(tmp_path / "s"), service)
        yield server
        service.hold.set()
        server.close()
        assert not service.open
        assert not (tmp_path / "s").exists()


@pytest.fixture(params=["socket", "local"])
def channel(request: pytest.FixtureRequest, service: Fake, server: rpc.Server) -> Iterator[rpc.Channel]:
    channel = rpc.SocketChannel(server.path, 5) if request.param == "socket" else rpc.LocalChannel(service)
    yield channel
    channel.close()
    channel.close()


def test_calls(channel: rpc.Channel) -> None:
    assert channel.call(m.Locate(["a", "b"]), m.Located) == m.Located([["a"], ["b"]])


def test_errors_come_back_as_themselves(channel: rpc.Channel) -> None:
    with pytest.raises(NotFound) as caught:
        channel.call(m.Heartbeat("x"), m.Registered)
    e = caught.value
    assert (e.what, e.key, e.need, e.have, e.fix) == ("no such messenger", "x", "n", "h", "Register.")


def test_a_wrong_reply_is_a_protocol_error(channel: rpc.Channel) -> None:
    with pytest.raises(ProtocolError):
        channel.call(m.Locate(["a"]), m.Done)


def test_a_closed_channel_says_so(channel: rpc.Channel) -> None:
    channel.close()
    with pytest.raises((ConnectionLost, PoolClosed)):
        channel.call(m.Locate(["a"]), m.Located)


def test_sessions_end_with_their_channel(service: Fake, server: rpc.Server) -> None:
    channels = [rpc.SocketChannel(server.path), rpc.LocalChannel(service)]
    assert eventually(lambda: len(service.open) == 2)
    for channel in channels:
        channel.close()
    assert eventually(lambda: not service.open)


def test_a_bug_in_a_handler_ends_one_request_only(server: rpc.Server) -> None:
    channel = rpc.SocketChannel(server.path)
    with pytest.raises(MoonpoolError, match="a bug"):
        channel.call(m.Register("n", "s", "g"), m.Registered)
    channel.call(m.Locate(["a"]), m.Located)
    channel.close()


def test_an_oversized_reply_is_an_error_and_no_hang(server: rpc.Server) -> None:
    channel = rpc.SocketChannel(server.path)
    with pytest.raises(MoonpoolError, match="over its cap"):
        channel.call(m.GetC2C(), m.C2C)
    channel.call(m.Locate(["a"]), m.Located)
    channel.close()


def test_a_server_that_does_not_answer_costs_one_deadline(server: rpc.Server) -> None:
    channel = rpc.SocketChannel(server.path, 0.05)
    with pytest.raises(DeadlineExceeded):
        channel.call(m.ListMessengers(), m.Messengers)
    with pytest.raises(ConnectionLost):  # a late answer must not be taken for the next one's
        channel.call(m.Locate(["a"]), m.Located)
    channel.close()


def test_close_wakes_a_waiting_call(server: rpc.Server) -> None:
    channel = rpc.SocketChannel(server.path)
    caught: list[MoonpoolError] = []

    def wait() -> None:
        try:
            channel.call(m.ListMessengers(), m.Messengers)
        except MoonpoolError as e:
            caught.append(e)

    thread = threading.Thread(target=wait)
    thread.start()
    assert eventually(lambda: channel._lock.locked())
    channel.close()
    thread.join(5)
    assert [type(e) for e in caught] == [ConnectionLost]


@pytest.mark.parametrize("bytes_", [OVERSIZED, OTHER_VERSION, GARBAGE, b"GET / HTTP/1.1\r\n\r\n"])
def test_hostile_bytes_get_a_typed_error_and_the_server_lives(server: rpc.Server, bytes_: bytes) -> None:
    with connect(server.path, timeout=5) as sock:
        sock.sendall(bytes_)
        body = framing.receive(sock)
        assert body is not None
        error = msgspec.msgpack.decode(body, type=m.Reply)
        assert isinstance(error, m.Error)
        assert error.name in ("ProtocolError", "FrameTooLarge")
        assert _hung_up(sock)
    channel = rpc.SocketChannel(server.path)
    channel.call(m.Locate(["a"]), m.Located)
    channel.close()


def _hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_an_unknown_message_ends_the_connection(server: rpc.Server) -> None:
    with connect(server.path, timeout=5) as sock:
        framing.send(sock, NO_SUCH_MESSAGE)
        body = framing.receive(sock)
        assert body is not None
        assert msgspec.msgpack.decode(body, type=m.Reply).name == "ProtocolError"  # type: ignore[union-attr]
        assert _hung_up(sock)


def test_a_message_may_not_exceed_its_bounds(server: rpc.Server) -> None:
    channel = rpc.SocketChannel(server.path)
    with pytest.raises(ProtocolError, match="unreadable"):
        channel.call(m.Locate([""]), m.Located)
    channel.close()


def test_sessions_are_bounded(service: Fake, server: rpc.Server, tmp_path: Path) -> None:
    server = rpc.Server(str(tmp_path / "few"), service, max_connections=2)
    held = [rpc.SocketChannel(server.path) for _ in range(2)]
    with pytest.raises(ConnectionLost, match="too many connections"):
        rpc.SocketChannel(server.path)
    held.pop().close()

    def room() -> bool:
        try:
            channel = rpc.SocketChannel(server.path)
        except ConnectionLost:
            return False
        channel.call(m.Locate(["a"]), m.Located)
        channel.close()
        return True

    assert eventually(room)
    held.pop().close()
    server.close()


def test_a_living_servers_socket_is_not_taken(server: rpc.Server) -> None:
    with pytest.raises(ConfigError, match="in use"):
        rpc.Server(server.path, Fake())


def test_a_dead_servers_socket_is(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(path)
    server = rpc.Server(path, Fake())
    assert Path(path).stat().st_mode & 0o077 == 0
    server.close()
    server.close()


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost):
        rpc.SocketChannel(str(tmp_path / "nobody"))
