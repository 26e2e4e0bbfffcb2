"""Server and channels with a service of three verbs."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from moonpool.errors import (
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    FrameTooLarge,
    MoonpoolError,
    NotFound,
    PoolClosed,
    ProtocolError,
)
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.wire import framing, rpc
from moonpool.wire import messages as m
from moonpool.wire.dial import connect
from tests import hostile
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
        server = rpc.Server([str(tmp_path / "s"), "127.0.0.1:0"], service)
        yield server
        service.hold.set()
        server.close()
        assert not service.open
        assert not (tmp_path / "s").exists()


@pytest.fixture(params=["unix", "tcp", "local"])
def channel(request: pytest.FixtureRequest, service: Fake, server: rpc.Server) -> Iterator[rpc.Channel]:
    address = server.addresses[request.param == "tcp"]
    channel = rpc.LocalChannel(service) if request.param == "local" else rpc.SocketChannel(address, 20)
    yield channel
    channel.close()
    channel.close()


def test_calls(channel: rpc.Channel) -> None:
    assert channel.call(m.Locate(["a", "b"]), m.Located) == m.Located([["a"], ["b"]])


def test_errors_come_back_as_themselves(channel: rpc.Channel) -> None:
    with pytest.raises(NotFound) as caught:
        channel.call(m.SetQuota("x", None), m.Registered)
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
        channel.call(m.GetQuotas(), m.Registered)
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


@pytest.mark.parametrize("which", [0, 1])
def test_e5_a_call_has_its_own_deadline(server: rpc.Server, service: Fake, which: int) -> None:
    channel = rpc.SocketChannel(server.addresses[which], 30)
    service.hold.set()
    channel.call(m.ListMessengers(), m.Messengers, timeout=20)
    service.hold.clear()
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        channel.call(m.ListMessengers(), m.Messengers, timeout=0.1)
    assert 0.09 < time.monotonic() - start < 2
    with pytest.raises(ConnectionLost):
        channel.call(m.Locate(["a"]), m.Located)
    channel.close()


def test_e5_the_deadline_counts_while_others_use_the_channel(server: rpc.Server, service: Fake) -> None:
    channel = rpc.SocketChannel(server.path, 30)
    first = threading.Thread(target=channel.call, args=(m.ListMessengers(), m.Messengers))
    first.start()
    assert eventually(lambda: channel._lock.locked())
    with pytest.raises(DeadlineExceeded, match="another call"):
        channel.call(m.Locate(["a"]), m.Located, timeout=0.05)
    service.hold.set()
    first.join()
    channel.call(m.Locate(["a"]), m.Located, timeout=20)  # nobody's reply was lost
    channel.close()


def fake_server(answer: Callable[[socket.socket], None]) -> tuple[str, threading.Thread]:
    """Lets one client in and answers its first request by `answer`."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listening:
            connection, _ = listening.accept()
        with connection:
            framing.receive(connection)
            framing.send(connection, msgspec.msgpack.encode(["Accepted", None]))
            framing.receive(connection)
            answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    return f"127.0.0.1:{listening.getsockname()[1]}", thread


LOCATED = hostile.frame(msgspec.msgpack.encode(m.Located([["b"]])))


def test_e5_a_drip_of_bytes_is_no_answer() -> None:
    over = threading.Event()

    def drip(connection: socket.socket) -> None:
        for i in range(len(LOCATED)):
            if over.wait(0.1):
                return
            connection.sendall(LOCATED[i : i + 1])

    address, thread = fake_server(drip)
    channel = rpc.SocketChannel(address, 0.5)
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        channel.call(m.Locate(["b"]), m.Located)
    assert 0.4 < time.monotonic() - start < 1.5  # all bytes would take longer
    over.set()
    thread.join()
    channel.close()


@pytest.mark.parametrize("cut", [0, 1, 8, 12])
def test_d4_a_server_that_dies_inside_a_reply(cut: int) -> None:
    address, thread = fake_server(lambda connection: connection.sendall(LOCATED[:cut]))
    channel = rpc.SocketChannel(address, 20)
    for _ in range(2):
        with pytest.raises(ConnectionLost):
            channel.call(m.Locate(["b"]), m.Located)
    thread.join()
    channel.close()


def test_d4_two_replies_where_one_was_asked_for() -> None:
    """The second must not answer the next request as if it were its own."""
    address, thread = fake_server(lambda connection: connection.sendall(LOCATED + LOCATED))
    channel = rpc.SocketChannel(address, 20)
    with pytest.raises(ProtocolError, match="more than one"):
        channel.call(m.Locate(["b"]), m.Located)
    with pytest.raises(ConnectionLost):
        channel.call(m.Locate(["c"]), m.Located)
    thread.join()
    channel.close()


@pytest.mark.parametrize("cut", [1, 7, 8, 20])
def test_d4_a_client_that_dies_inside_a_request(server: rpc.Server, service: Fake, cut: int) -> None:
    for address in server.addresses:
        with connect(address, timeout=20) as sock:
            sock.sendall(hostile.frame(msgspec.msgpack.encode(m.Locate(["a" * 100])))[:cut])
        assert eventually(lambda: not service.open)
        channel = rpc.SocketChannel(address)
        assert channel.call(m.Locate(["b"]), m.Located) == m.Located([["b"]])
        channel.close()


def test_a_client_may_send_ahead(server: rpc.Server) -> None:
    """Requests that come together, or cut at any place, are answered in order."""
    requests = b"".join(hostile.frame(msgspec.msgpack.encode(m.Locate([str(i) * i]))) for i in range(1, 60))
    for size in (1, 7, 13, 1000, len(requests)):
        with connect(server.addresses[1], timeout=20) as sock:
            sender = threading.Thread(
                target=lambda sock=sock, size=size: [
                    sock.sendall(requests[i : i + size]) for i in range(0, len(requests), size)
                ]
            )
            sender.start()
            for i in range(1, 60):
                body = framing.receive(sock)
                assert body is not None
                assert msgspec.msgpack.decode(body, type=m.Located) == m.Located([[str(i) * i]])
            sender.join()


@pytest.mark.parametrize("size", [1, 40_000, 65_520, 65_528, 65_536, 70_000, 1_000_000, 20_000_000])
def test_replies_of_all_sizes(server: rpc.Server, size: int) -> None:
    count, length = (1, size) if size <= 1000 else (size // 1000, 990)
    keys = ["k" * length] * count
    for address in server.addresses:
        channel = rpc.SocketChannel(address, 10)
        assert channel.call(m.Locate(keys), m.Located) == m.Located([[k] for k in keys])
        assert channel.call(m.Locate(["a"]), m.Located) == m.Located([["a"]])
        channel.close()


def test_a_request_over_the_cap_costs_nothing_but_itself(server: rpc.Server) -> None:
    channel = rpc.SocketChannel(server.path, 10)
    with pytest.raises(FrameTooLarge):
        channel.call(m.Locate(["k" * 1000] * 40_000), m.Located)
    assert channel.call(m.Locate(["a"]), m.Located) == m.Located([["a"]])
    channel.close()


def test_j5_thousands_of_calls_use_one_connection(server: rpc.Server, service: Fake) -> None:
    channel = rpc.SocketChannel(server.addresses[1], 10)
    threads = [
        threading.Thread(target=lambda: [channel.call(m.Locate(["a"]), m.Located) for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    channel.close()
    assert service.opened == 1


def test_a_service_knows_who_is_there(server: rpc.Server, service: Fake) -> None:
    channels = [rpc.SocketChannel(a) for a in server.addresses] + [rpc.LocalChannel(service)]
    assert eventually(lambda: len(service.peers) == 3)
    unix, tcp, here = sorted(service.peers, key=lambda p: ("pid" not in p.name, "127." not in p.name))
    assert (unix.role, unix.local) == ("admin", True)
    assert f"pid {os.getpid()}" in unix.name
    assert (tcp.role, tcp.local) == ("data", False)
    assert (here.role, here.local) == ("admin", True)
    for channel in channels:
        channel.close()


def test_descriptors_go_over_unix_sockets_only(server: rpc.Server, service: Fake) -> None:
    r, w = os.pipe()
    service.lend = r
    for which in (0, 1):
        channel = rpc.SocketChannel(server.addresses[which], 20)
        channel.call(m.Locate(["a"]), m.Located)
        if which == 0:
            fd = channel.take_descriptor()
            os.write(w, b"through")
            assert os.read(fd, 7) == b"through"
            os.close(fd)
        else:
            with pytest.raises(ProtocolError, match="no descriptor"):
                channel.take_descriptor()
        channel.close()
    os.close(r)
    os.close(w)


def test_all_addresses_or_none(service: Fake, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        rpc.Server([str(tmp_path / "s"), "127.0.0.1:0", "0.0.0.0:0"], service)
    assert not (tmp_path / "s").exists()


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
    with connect(server.path, timeout=20) as sock:
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
    with connect(server.path, timeout=20) as sock:
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
