"""Listening and connecting: places, ports, purposes, strangers, descriptors."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.errors import ConfigError, ConnectionLost, DeadlineExceeded, MoonpoolError, ProtocolError
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.wire import framing
from moonpool.wire import listener as listeners
from moonpool.wire.address import TcpAddress
from moonpool.wire.auth import Peer, Security
from moonpool.wire.dial import connect
from moonpool.wire.listener import Listener

SECRET = Security(b"canary-secret-0123456789")
EVERYWHERE = ["127.0.0.1:0", "[::1]:0", "localhost:0", "unix"]


class Echo:
    """Remembers who came."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []

    def __call__(self, sock: socket.socket, peer: Peer) -> None:
        self.peers.append(peer)
        while data := sock.recv(100):
            sock.sendall(data)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with no_leaks():
        yield


def says_back(sock: socket.socket, data: bytes = b"hello") -> bool:
    sock.sendall(data)
    return sock.recv(100) == data


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("security", [Security(), SECRET], ids=["open", "secret"])
def test_each_purpose_has_its_handler(place: str, security: Security, tmp_path: Path) -> None:
    rpc, data = Echo(), Echo()
    listener = Listener(str(tmp_path / "s") if place == "unix" else place, security, {"rpc": rpc, "data": data})
    for purpose, mine, other in (("rpc", rpc, data), ("data", data, rpc)):
        with connect(listener.address, security, 20, purpose=purpose) as sock:
            assert says_back(sock)
            assert (len(mine.peers), len(other.peers)) == (1, 0) if purpose == "rpc" else (1, 1)
            assert mine.peers[0].local == (place == "unix")
            assert sock.gettimeout() == 20
    with pytest.raises(ProtocolError, match="not offered"):
        connect(listener.address, security, 20, purpose="other")
    listener.close()
    listener.close()


def test_j1_sixteen_at_once_get_sixteen_ports() -> None:
    found: list[Listener] = []
    threads = [threading.Thread(target=lambda: found.append(Listener("127.0.0.1:0", SECRET, {}))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({x.address for x in found}) == 16
    assert all(isinstance(x.address, TcpAddress) and x.address.port for x in found)
    for x in found:
        with pytest.raises(ProtocolError):  # it is there, and offers nothing
            connect(x.address, SECRET, 20)
        x.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_j1_j2_a_busy_port_is_named_with_its_purpose(host: str) -> None:
    first = Listener(f"{host}:0", Security(), {})
    assert isinstance(first.address, TcpAddress)
    with pytest.raises(ConfigError, match=rf"messenger data port {first.address.port} cannot be had.*in use") as caught:
        Listener(first.address, Security(), {}, name="messenger data")
    assert f"process {os.getpid()} (" in caught.value.have
    first.close()
    Listener(first.address, Security(), {}).close()  # free again at once


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"])
def test_beyond_this_machine_only_with_a_secret(address: str) -> None:
    with pytest.raises(ConfigError, match="MOONPOOL_SECRET_FILE"):
        Listener(address, Security(), {})
    with pytest.raises(ConfigError, match="MOONPOOL_SECRET_FILE"):
        Listener(address, Security(None, b"only-for-admins-0123456"), {})


def test_both_families_at_once() -> None:
    echo = Echo()
    listener = Listener("[::]:0", SECRET, {"rpc": echo})
    assert isinstance(listener.address, TcpAddress)
    for host in ("127.0.0.1", "::1"):
        with connect(TcpAddress(host, listener.address.port), SECRET, 20) as sock:
            assert says_back(sock)
    listener.close()


def test_m4_small_messages_leave_at_once_and_dead_hosts_are_noticed() -> None:
    options: list[list[int]] = []

    def look(sock: socket.socket, _: Peer) -> None:
        options.append(figures(sock))

    def figures(sock: socket.socket) -> list[int]:
        tcp = socket.IPPROTO_TCP
        return [
            sock.getsockopt(tcp, socket.TCP_NODELAY),
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            sock.getsockopt(tcp, socket.TCP_USER_TIMEOUT),
            sock.getsockopt(tcp, socket.TCP_KEEPIDLE)
            + sock.getsockopt(tcp, socket.TCP_KEEPINTVL) * sock.getsockopt(tcp, socket.TCP_KEEPCNT),
        ]

    listener = Listener("127.0.0.1:0", Security(), {"rpc": look})
    with connect(listener.address, timeout=20) as sock:
        assert figures(sock) == [1, 1, 10_000, 10]
        assert sock.recv(1) == b""
    assert options == [[1, 1, 10_000, 10]]
    listener.close()


def test_j3_two_starters_cannot_both_take_a_dead_ones_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    for _ in range(10):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(path)
        got: list[Listener | ConfigError] = []
        at_once = threading.Barrier(4)

        def start(got: list[Listener | ConfigError] = got, at_once: threading.Barrier = at_once) -> None:
            at_once.wait()
            try:
                got.append(Listener(path, Security(), {"rpc": Echo()}))
            except ConfigError as e:
                got.append(e)

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [x for x in got if isinstance(x, Listener)]
        assert len(winners) == 1
        with connect(path, timeout=20) as sock:
            assert says_back(sock)
        winners[0].close()
        assert not list(tmp_path.iterdir())


def test_a_socket_file_is_for_its_user_only(tmp_path: Path) -> None:
    listener = Listener(str(tmp_path / "new folder" / "s"), Security(), {})
    assert (tmp_path / "new folder" / "s").stat().st_mode & 0o777 == 0o600
    listener.close()


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("mine")
    with pytest.raises(ConfigError, match="socket cannot be had"):
        Listener(str(tmp_path / "s"), Security(), {})
    assert (tmp_path / "s").read_text() == "mine"


def test_connections_are_bounded_and_the_refusal_is_typed() -> None:
    listener = Listener("127.0.0.1:0", SECRET, {"rpc": Echo()}, max_connections=2)
    held = [connect(listener.address, SECRET, 20) for _ in range(2)]
    assert listener.connections == 2
    with pytest.raises(ConnectionLost, match="too many connections; needed <= 2"):
        connect(listener.address, SECRET, 20)
    held.pop().close()
    assert eventually(lambda: listener.connections == 1)
    with connect(listener.address, SECRET, 20) as sock:
        assert says_back(sock)
    held.pop().close()
    listener.close()


def test_idle_strangers_do_not_lock_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "MAX_STRANGERS", 4)
    monkeypatch.setattr(listeners, "_CROWDED_S", 0.01)
    listener = Listener("127.0.0.1:0", SECRET, {"rpc": Echo()})
    assert isinstance(listener.address, TcpAddress)
    idle = [socket.create_connection(listener.address) for _ in range(20)]
    with connect(listener.address, SECRET, 20) as sock:
        assert says_back(sock)
    assert threading.active_count() < 20
    for sock in idle:
        sock.close()
    listener.close()


def test_a_stranger_has_one_deadline_however_it_drips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "HANDSHAKE_S", 0.2)
    listener = Listener("127.0.0.1:0", SECRET, {"rpc": Echo()})
    assert isinstance(listener.address, TcpAddress)
    frame = framing.HEADER.pack(framing.MAGIC, framing.VERSION, 1000) + bytes(1000)
    with socket.create_connection(listener.address, timeout=0.02) as sock:
        start, sent = time.monotonic(), 0
        while not hung_up(sock):
            sock.sendall(frame[sent : sent + 1])
            sent += 1
        assert sent < 1000
        assert 0.19 < time.monotonic() - start < 5
    listener.close()


def hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1000) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def test_l5_the_descriptor_limit_neither_spins_nor_kills(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener("127.0.0.1:0", Security(), {"rpc": Echo()})
    assert isinstance(listener.address, TcpAddress)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[socket.socket] = []
    errors: list[MoonpoolError] = []
    spent = time.process_time()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        for _ in range(200):
            try:
                held.append(connect(listener.address, timeout=0.05))
            except MoonpoolError as e:
                errors.append(e)
        assert errors
        assert all(isinstance(e, ConnectionLost | DeadlineExceeded) for e in errors)
        for sock in held:
            sock.close()
        assert eventually(lambda: listener.connections == 0)
        with connect(listener.address, timeout=20) as sock:
            assert says_back(sock)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    listener.close()
    assert sum("cannot accept" in r.message for r in caplog.records) < 50
    assert time.process_time() - spent < 5


def test_nobody_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"localhost:{port}", str(tmp_path / "s"), "no.invalid:1"):
        with pytest.raises(ConnectionLost) as caught:
            connect(address, timeout=20)
        assert caught.value.key == address
    with pytest.raises(ConfigError, match="port 0"):
        connect("127.0.0.1:0")


@pytest.mark.parametrize("security", [Security(), SECRET], ids=["open", "secret"])
def test_e5_a_server_that_does_not_answer_costs_one_deadline(security: Security) -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            connect(f"127.0.0.1:{frozen.getsockname()[1]}", security, 0.2)
        assert 0.19 < time.monotonic() - start < 2


def test_e5_a_full_backlog_costs_one_deadline(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as frozen:
        frozen.bind(path)
        frozen.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
            first.connect(path)
            start = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                connect(path, timeout=0.2)
            assert 0.19 < time.monotonic() - start < 2


def test_a_bug_in_a_handler_ends_one_connection(caplog: pytest.LogCaptureFixture) -> None:
    def fails(sock: socket.socket, _: Peer) -> None:
        raise RuntimeError("a bug")

    listener = Listener("127.0.0.1:0", Security(), {"rpc": Echo(), "data": fails})
    with connect(listener.address, timeout=20, purpose="data") as sock:
        assert sock.recv(1) == b""
    with connect(listener.address, timeout=20) as sock:
        assert says_back(sock)
    listener.close()
    assert "a bug" in caplog.text


def test_e6_close_ends_connections_in_every_state() -> None:
    listener = Listener("127.0.0.1:0", SECRET, {"rpc": Echo()})
    assert isinstance(listener.address, TcpAddress)
    with socket.create_connection(listener.address) as stranger, connect(listener.address, SECRET, 20) as friend:
        assert says_back(friend)
        start = time.monotonic()
        listener.close()
        assert time.monotonic() - start < 2
        assert friend.recv(1) == b""
        stranger.settimeout(20)
        assert eventually(lambda: not [t for t in threading.enumerate() if t.name == "server"])
    with pytest.raises(ConnectionLost):
        connect(listener.address, SECRET, 20)
