"""TLS over TCP: certificates made here by the openssl command."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.errors import AccessDenied, ConfigError, WireError
from moonpool.testing.leaks import no_leaks
from moonpool.wire import messages as m
from moonpool.wire import rpc, tls
from moonpool.wire.auth import Security, TlsFiles, load_security
from moonpool.wire.dial import connect
from tests.certificates import Authority, needs_openssl
from tests.unit.wire.services import Fake

pytestmark = needs_openssl

SECRET = b"canary-secret-0123456789"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority(tmp_path_factory.mktemp("tls") / "ca")
    authority.sign("server", "IP:127.0.0.1,DNS:pool.example")
    authority.sign("client", "DNS:client")
    return authority


def files(authority: Authority, who: str = "", **others: object) -> TlsFiles:
    return authority.files(who, **others)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with no_leaks():
        yield


def serve(files: TlsFiles | None, secret: bytes | None = SECRET) -> rpc.Server:
    return rpc.Server("127.0.0.1:0", Fake(), security=Security(secret, tls=files))


def port_of(server: rpc.Server) -> int:
    return server.addresses[0].port  # type: ignore[union-attr]


@pytest.mark.parametrize("secret", [SECRET, None])
def test_calls_over_tls(authority: Authority, secret: bytes | None) -> None:
    server = serve(files(authority, "server"), secret)
    channel = rpc.SocketChannel(server.addresses[0], 20, security=Security(secret, tls=files(authority)))
    for count in (1, 2, 20_000):  # 20 000 keys take many records
        keys = [f"key {i}" for i in range(count)]
        assert channel.call(m.Locate(keys), m.Located) == m.Located([[k] for k in keys])
    channel.close()
    server.close()


def test_the_secret_and_all_else_are_hidden(authority: Authority) -> None:
    """What goes over the wire shows neither magic nor message."""
    server = serve(files(authority, "server"))
    tapped: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as middle:

        def pump() -> None:
            near, _ = middle.accept()
            with near, socket.create_connection(("127.0.0.1", port_of(server))) as far:
                back = threading.Thread(target=copy, args=(far, near))
                back.start()
                copy(near, far)
                back.join()

        def copy(source: socket.socket, sink: socket.socket) -> None:
            try:
                while data := source.recv(65536):
                    tapped.append(data)
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)
            except OSError:
                pass

        thread = threading.Thread(target=pump)
        thread.start()
        security = Security(SECRET, tls=files(authority))
        channel = rpc.SocketChannel(f"127.0.0.1:{middle.getsockname()[1]}", 20, security=security)
        channel.call(m.Locate(["a-key-to-look-for"]), m.Located)
        channel.close()
        thread.join(5)
    server.close()
    assert len(b"".join(tapped)) > 1000
    assert b"a-key-to-look-for" not in b"".join(tapped)
    assert b"Open" not in b"".join(tapped)


def test_a_server_of_another_authority_is_not_trusted(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    server = serve(files(authority, "server"))
    with pytest.raises(AccessDenied, match="not trusted"):
        connect(server.addresses[0], Security(SECRET, tls=files(other)), 20)
    server.close()


def test_a_certificate_is_for_its_names(authority: Authority) -> None:
    server = serve(files(authority, "server"))
    for address, name, good in (
        (f"127.0.0.1:{port_of(server)}", "", True),
        (f"localhost:{port_of(server)}", "", False),
        (f"localhost:{port_of(server)}", "pool.example", True),
        (f"127.0.0.1:{port_of(server)}", "other.example", False),
    ):
        security = Security(SECRET, tls=files(authority, name=name))
        if good:
            connect(address, security, 20).close()
        else:
            with pytest.raises(AccessDenied, match="not trusted"):
                connect(address, security, 20)
    server.close()


def test_mutual(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    other.sign("client", "DNS:client")
    server = serve(files(authority, "server", mutual=True))
    connect(server.addresses[0], Security(SECRET, tls=files(authority, "client")), 20).close()
    stranger = TlsFiles(ca=files(authority).ca, cert=files(other, "client").cert, key=files(other, "client").key)
    for bad in (files(authority), stranger):
        with pytest.raises(WireError):
            connect(server.addresses[0], Security(SECRET, tls=bad), 20)
    server.close()


def test_the_secret_is_still_needed(authority: Authority) -> None:
    server = serve(files(authority, "server"))
    with pytest.raises(AccessDenied, match="wrong secret"):
        connect(server.addresses[0], Security(b"x" * 16, tls=files(authority)), 20)
    server.close()


def test_one_side_without_tls_is_told(authority: Authority) -> None:
    for server_tls, client_tls in ((files(authority, "server"), None), (None, files(authority))):
        server = serve(server_tls)
        with pytest.raises(WireError, match="TLS"):
            connect(server.addresses[0], Security(SECRET, tls=client_tls), 20)
        connect(server.addresses[0], Security(SECRET, tls=server_tls and files(authority)), 20).close()
        server.close()


def test_old_protocols_are_refused(authority: Authority) -> None:
    for context in (tls.server_context(files(authority, "server")), tls.client_context(files(authority))):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_unix_sockets_need_no_tls(authority: Authority, tmp_path: Path) -> None:
    security = Security(SECRET, tls=files(authority, "server"))
    server = rpc.Server([str(tmp_path / "s"), "127.0.0.1:0"], Fake(), security=security)
    for address in server.addresses:
        channel = rpc.SocketChannel(address, 20, security=security)
        channel.call(m.Locate(["a"]), m.Located)
        channel.close()
    server.close()


def test_bad_files(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "garbage").write_text("no PEM")
    garbage = str(tmp_path / "garbage")
    good = files(authority, "server")
    for bad in (
        TlsFiles(cert=garbage, key=good.key),
        TlsFiles(cert=good.cert, key=files(authority, "client").key),
        TlsFiles(cert=good.cert, key=str(tmp_path / "none")),
        TlsFiles(ca=good.ca),
        TlsFiles(cert=good.cert, key=good.key, mutual=True),
        TlsFiles(cert=good.cert, key=good.key, ca=garbage),
    ):
        with pytest.raises(ConfigError):
            serve(bad)
    loaded = load_security(tls_cert=good.cert, tls_key=good.key, tls_ca=good.ca, tls_name="n", tls_mutual=True)
    assert loaded.tls == TlsFiles(cert=good.cert, key=good.key, ca=good.ca, name="n", mutual=True)


def test_a_stranger_may_send_anything(authority: Authority) -> None:
    server = serve(files(authority, "server"))
    for data in (b"", b"\0", b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01\x40\x00" + b"x" * 100, b"\x16\x03\x03\xff\xff"):
        with socket.create_connection(("127.0.0.1", port_of(server)), timeout=20) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            try:
                while sock.recv(1000):
                    pass
            except ConnectionResetError:
                pass
    connect(server.addresses[0], Security(SECRET, tls=files(authority)), 20).close()
    server.close()
