"""The data purpose of a messenger's port: transfers over every kind of connection, and hostile guests on it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.testing.leaks import eventually, no_leaks
from moonpool.transfer import frames
from moonpool.transfer.base import Op
from moonpool.transfer.client import TransferClient
from moonpool.transfer.registry import Region, Registry
from moonpool.transfer.server import TransferServer
from moonpool.wire import messages as m
from moonpool.wire import rpc
from moonpool.wire.address import Address
from moonpool.wire.auth import Security
from moonpool.wire.dial import connect
from tests import hostile
from tests.certificates import Authority, needs_openssl
from tests.unit.wire.services import Fake

SECRET = b"canary-secret-0123456789"
SIZE = 3 << 20


class Port:
    """One server with both purposes, and a registered region behind it."""

    def __init__(self, addresses: list[str], server: Security, client: Security) -> None:
        self.registry = Registry()
        self.memory = bytearray(bytes(range(256)) * (SIZE // 256))
        self.region: Region = self.registry.register(memoryview(self.memory))
        self.transfers = TransferServer(self.registry)
        self.client = client
        data = {"data": lambda sock, _peer: self.transfers.serve(sock)}
        self.server = rpc.Server(addresses, Fake(), security=server, handlers=data)

    def moves_bytes(self, address: Address) -> bool:
        client = TransferClient(lambda: connect(address, self.client, 20, purpose="data"))
        new, back = bytes(reversed(self.memory)), bytearray(SIZE)
        try:
            for kind, local in (("write", memoryview(new)), ("read", memoryview(back))):
                op = Op(kind, self.region.id, self.region.generation, 0, local)  # type: ignore[arg-type]
                assert client.run([op], timeout=10, checksum=True) == [SIZE]
        finally:
            client.close()
        channel = rpc.SocketChannel(address, 20, security=self.client)  # and the same port still does RPC
        channel.call(m.Locate(["a"]), m.Located)
        channel.close()
        return bytes(back) == new == self.memory

    def close(self) -> None:
        self.transfers.close()
        self.server.close()
        self.registry.unregister(self.region)


@pytest.mark.parametrize("security", [Security(), Security(SECRET)], ids=["open", "secret"])
def test_transfers_share_the_port_with_calls(security: Security, tmp_path: Path) -> None:
    with no_leaks():
        port = Port([str(tmp_path / "s"), "127.0.0.1:0", "[::1]:0"], security, security)
        assert all(port.moves_bytes(address) for address in port.server.addresses)
        port.close()


@needs_openssl
def test_transfers_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    authority.sign("server", "IP:127.0.0.1")
    with no_leaks():
        server = Security(SECRET, tls=authority.files("server"))
        port = Port(["127.0.0.1:0"], server, Security(SECRET, tls=authority.files()))
        assert port.moves_bytes(port.server.addresses[0])
        port.close()


@pytest.fixture(scope="module")
def port() -> Iterator[Port]:
    with no_leaks():
        port = Port(["127.0.0.1:0"], Security(SECRET), Security(SECRET))
        before = hostile.resident()
        yield port
        assert hostile.resident() - before < 64 * hostile.MIB
        port.close()


headers = st.builds(
    lambda magic, version, kind, flags, count, zero, total: struct.pack(
        "<HBBIIIQ", magic, version, kind, flags, count, zero, total
    ),
    st.sampled_from([0x544D, 0x4D50, 0]),
    st.sampled_from([frames.VERSION, 0, 255]),
    st.integers(0, 20) | st.integers(0, 255),
    st.integers(0, 3) | st.integers(0, 0xFFFFFFFF),
    st.integers(0, 4) | st.integers(0, 0xFFFFFFFF),
    st.sampled_from([0, 0, 0, 1]),
    st.integers(0, 200) | st.integers(0, (1 << 64) - 1),
)
spans = st.lists(
    st.tuples(
        st.integers(0, 3) | st.integers(0, (1 << 64) - 1),
        st.integers(0, (1 << 64) - 1),
        st.integers(0, 100) | st.integers(0, (1 << 64) - 1),
        st.integers(0, 100) | st.integers(0, (1 << 64) - 1),
    ),
    max_size=4,
).map(lambda rows: b"".join(struct.pack("<QQQQ", *row) for row in rows))
batches = st.builds(lambda *parts: b"".join(parts), headers, spans, st.binary(max_size=200))


@settings(max_examples=200, deadline=None)
@given(data=hostile.streams | batches | st.lists(batches, max_size=3).map(b"".join))
def test_a_guest_who_sends_nonsense_changes_no_byte(port: Port, data: bytes) -> None:
    before = bytes(port.memory)
    with connect(port.server.addresses[0], port.client, 10, purpose="data") as sock:
        hostile.converse(sock, data)
    assert eventually(lambda: port.server.listeners[0].connections == 0)
    assert port.memory == before


def test_after_all_that_it_serves(port: Port) -> None:
    assert port.moves_bytes(port.server.addresses[0])
