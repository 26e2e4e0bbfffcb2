"""Batches over TCP between an honest server and an honest client."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import random
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.errors import (
    ConnectionLost,
    MoonpoolError,
    NotRegistered,
    Overlap,
    PoolClosed,
    StaleRegion,
    TransferError,
    WireError,
)
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.transfer import Op, Registry, TransferClient, TransferServer, frames, splice
from moonpool.transfer.registry import Span
from moonpool.transfer.segment import Segment
from tests.transfer.support import Place, pattern, place, read, serving, write

SIZES = [0, 1, 4095, 4096, 4097, 65536, (1 << 20) + 3]


@pytest.fixture(params=["private memory", "a memfd"])
def memory(request: pytest.FixtureRequest) -> Iterator[tuple[memoryview, int]]:
    if request.param == "private memory":
        yield memoryview(bytearray(8 << 20)), -1
        return
    segment = Segment.create(8 << 20)
    yield segment.view, segment.fd
    segment.close()


@pytest.mark.parametrize("checksum", [False, True])
def test_every_byte_of_every_size_arrives(memory: tuple[memoryview, int], checksum: bool) -> None:
    view, fd = memory
    view[:] = pattern(len(view))
    registry = Registry()
    with no_leaks(), serving(registry) as there, TransferClient(there.connect) as client:
        region = registry.register(view, fd=fd)
        locals_ = [bytearray(size) for size in SIZES]
        starts = [sum(SIZES[:i]) + 7 * i for i in range(len(SIZES))]
        batch = [read(region, start, local) for start, local in zip(starts, locals_, strict=True)]
        assert client.run(batch, timeout=10, checksum=checksum) == SIZES
        for start, local in zip(starts, locals_, strict=True):
            assert local == view[start : start + len(local)]
        news = [pattern(size, seed=3) for size in SIZES]
        batch = [write(region, start, new) for start, new in zip(starts, news, strict=True)]
        assert client.run(batch, timeout=10, checksum=checksum) == SIZES
        for start, new in zip(starts, news, strict=True):
            assert view[start : start + len(new)] == new
        registry.close()


def test_neighbours_between_written_spans_are_untouched() -> None:
    registry = Registry()
    arena = bytearray(b"." * 3000)
    with serving(registry) as there, TransferClient(there.connect) as client:
        region = registry.register(arena)
        assert client.run([write(region, 1000, b"x" * 1000)], timeout=5) == [1000]
        registry.close()
    assert arena == b"." * 1000 + b"x" * 1000 + b"." * 1000


def test_more_ops_than_one_frame_holds_and_more_bytes_than_one_piece() -> None:
    registry = Registry()
    source = pattern(40 << 20)
    with serving(registry) as there, TransferClient(there.connect) as client:
        region = registry.register(source)
        many = memoryview(bytearray(3 * (frames.MAX_OPS + 5)))
        ops = [read(region, 3 * i, many[3 * i : 3 * i + 3]) for i in range(frames.MAX_OPS + 5)]
        assert client.run(ops, timeout=10) == [3] * len(ops)
        assert many == source[: len(many)]
        big = bytearray(len(source))
        assert client.run([read(region, 0, big)], timeout=10) == [len(source)]
        assert big == source
        registry.close()


def test_a_large_batch_uses_all_connections_and_a_small_one_only_one() -> None:
    registry = Registry()
    region = registry.register(pattern(8 << 20))
    server = TransferServer(registry)

    def handler(sock: socket.socket) -> None:
        assert wanted == 1 or eventually(lambda: there.connections == wanted)  # answers when all are there
        server.serve(sock)

    for size, wanted in ((8 << 20, 3), (100, 1)):
        with place(handler) as there, TransferClient(there.connect, streams=3) as client:
            local = memoryview(bytearray(size))
            ops = [read(region, i * size // 10, local[i * size // 10 : (i + 1) * size // 10]) for i in range(10)]
            assert client.run(ops, timeout=20) == [len(op.local) for op in ops]
            assert there.connections == wanted
            assert local == pattern(8 << 20)[:size]
    server.close()
    registry.close()


def test_errors_stand_at_their_own_places_and_touch_nothing() -> None:
    registry = Registry()
    arena = bytearray(pattern(4096))
    region, constant = registry.register(arena), registry.register(b"constant")
    old = registry.register(bytearray(64))
    registry.unregister(old)
    new = registry.register(bytearray(64))
    assert new.id == old.id
    locals_ = [bytearray(b"?" * 64) for _ in range(8)]
    with serving(registry) as there, TransferClient(there.connect) as client:
        ops = [read(region, 64 * i, local) for i, local in enumerate(locals_)]
        ops[2] = read(old, 0, locals_[2])
        ops[5] = read(region, 4096 - 63, locals_[5])
        results = client.run(ops, timeout=5)
        assert isinstance(results[2], StaleRegion)
        assert isinstance(results[5], NotRegistered)
        assert "region 1 [0xfc1, 0x1001)" in str(results[5])
        assert [r for i, r in enumerate(results) if i not in (2, 5)] == [64] * 6
        assert locals_[2] == locals_[5] == b"?" * 64
        assert all(locals_[i] == arena[64 * i : 64 * i + 64] for i in (0, 1, 3, 4, 6, 7))
        results = client.run(
            [
                write(region, 0, b"a" * 8),
                write(region, 4090, b"b" * 500000),
                write(constant, 0, b"c"),
                write(region, 8, b"d"),
            ],
            timeout=5,
        )
        assert [type(r) for r in results] == [int, NotRegistered, TransferError, int]
        assert arena == b"a" * 8 + b"d" + pattern(4096)[9:]
        registry.close()


def test_the_same_memory_by_absolute_address() -> None:
    registry = Registry()
    region = registry.register(pattern(4096))
    local = bytearray(100)
    with serving(registry) as there, TransferClient(there.connect) as client:
        results = client.run([Op("read", 0, 0, region.address + 50, memoryview(local))], timeout=5)
        assert results == [100]
        assert local == pattern(4096)[50:150]
        beyond = Op("read", 0, 0, region.address + 4000, memoryview(local))
        (refused,) = client.run([beyond], timeout=5)
        assert isinstance(refused, NotRegistered)
        assert refused.key == f"[{region.address + 4000:#x}, {region.address + 4100:#x})"
        registry.close()


def test_overlapping_destinations_are_refused_and_overlapping_sources_are_not() -> None:
    registry = Registry()
    region = registry.register(bytearray(4096))
    local = memoryview(bytearray(200))
    with serving(registry) as there, TransferClient(there.connect) as client:
        for batch in (
            [read(region, 0, local[:101]), read(region, 500, local[100:])],
            [read(region, 0, local[:101]), write(region, 500, local[100:])],
            [write(region, 0, local[:100]), write(region, 99, local[100:])],
            [read(region, 0, local[:100]), write(region, 99, local[100:])],
        ):
            with pytest.raises(Overlap):
                client.run(batch, timeout=5)
        assert there.connections == 0
        same_source = [write(region, 0, local), write(region, 200, local)]
        assert client.run(same_source, timeout=5) == [200, 200]
        assert client.run([read(region, 0, local[:100]), read(region, 0, local[100:])], timeout=5) == [100, 100]
        with pytest.raises(TransferError):
            client.run([read(region, 0, memoryview(b"read-only"))], timeout=5)
        registry.close()


@pytest.mark.parametrize("workers", [1, 16])
def test_no_byte_differs_at_any_concurrency(workers: int) -> None:
    """4 large and 4 small descriptors a transfer, as in the report of silently wrong pages."""
    shape = [242_483] * 4 + [1_638] * 4
    source = pattern(4 << 20)
    registry = Registry()
    region = registry.register(source)
    wrong: list[int] = []

    def work(client: TransferClient, seed: int) -> None:
        dice = random.Random(seed)
        arena = memoryview(bytearray(sum(shape)))
        for _ in range(128 // workers):
            starts = [dice.randrange(len(source) - size) for size in shape]
            ends = [sum(shape[: i + 1]) for i in range(len(shape))]
            parts = [arena[end - size : end] for end, size in zip(ends, shape, strict=True)]
            ops = [read(region, start, part) for start, part in zip(starts, parts, strict=True)]
            assert client.run(ops, timeout=30) == shape
            expected = b"".join(source[s : s + n] for s, n in zip(starts, shape, strict=True))
            if hashlib.blake2b(arena).digest() != hashlib.blake2b(expected).digest():
                wrong.append(seed)

    with no_leaks(), serving(registry) as there, TransferClient(there.connect) as client:
        threads = [threading.Thread(target=work, args=(client, seed)) for seed in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert there.connections <= 2
    registry.close()
    assert wrong == []


def test_many_small_transfers_share_the_connections_also_after_the_peer_restarts() -> None:
    registry = Registry()
    region = registry.register(pattern(4096))
    server = TransferServer(registry)
    there = Place(server.serve)
    with TransferClient(there.connect) as client:
        local = bytearray(8)
        for i in range(2000):
            assert client.run([read(region, i, local)], timeout=5) == [8]
        assert there.connections == 1
        there.close()
        there = Place(server.serve, there.port)
        failures = [r for _ in range(100) for r in client.run([read(region, 0, local)], timeout=5) if r != 8]
        assert len(failures) <= 2
        assert there.connections == 1
    there.close()
    server.close()
    registry.close()


def test_a_failed_first_connection_is_not_remembered() -> None:
    registry = Registry()
    region = registry.register(pattern(4096))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with TransferClient(lambda: socket.create_connection(("127.0.0.1", port), timeout=5)) as client:
        local = bytearray(8)
        (failed,) = client.run([read(region, 0, local)], timeout=5)
        assert isinstance(failed, ConnectionLost)
        server = TransferServer(registry)
        there = Place(server.serve, port)
        assert client.run([read(region, 0, local)], timeout=5) == [8]
        there.close()
        server.close()
    registry.close()


def test_sixteen_readers_of_an_owner_that_closes_get_right_bytes_or_a_typed_error() -> None:
    source = pattern(8 << 20)
    registry = Registry()
    region = registry.register(source)
    started = threading.Barrier(17)
    outcomes: list[int | MoonpoolError] = []

    def work(client: TransferClient) -> None:
        local = bytearray(len(source))
        started.wait()
        while True:
            (result,) = client.run([read(region, 0, local)], timeout=20)
            outcomes.append(result)
            if not isinstance(result, int):
                return
            assert local == source

    with no_leaks():
        with serving(registry) as there:
            clients = [TransferClient(there.connect) for _ in range(16)]
            threads = [threading.Thread(target=work, args=(client,)) for client in clients]
            for thread in threads:
                thread.start()
            started.wait()
            assert eventually(lambda: len(outcomes) >= 4)
            registry.close(wait_s=0)
        for thread in threads:
            thread.join()
        for client in clients:
            client.close()
    errors = [o for o in outcomes if not isinstance(o, int)]
    assert len(errors) == 16
    assert all(isinstance(e, (WireError, NotRegistered)) for e in errors)


def test_giving_a_region_up_ends_the_transfer_of_a_peer_that_stands_still() -> None:
    registry = Registry()
    region = registry.register(bytearray(64 << 20))
    with no_leaks(), serving(registry) as there, there.connect() as sock:
        span = Span(region.id, region.generation, 0, region.size)
        sock.sendall(frames.header(frames.Kind.READ, False, 1, region.size) + frames.spans_table([span]))
        sock.recv(1)  # the answer has begun, and nobody reads on
        registry.unregister(region, wait_s=0)
        assert registry.regions() == []


def test_closing_the_client_ends_its_transfers_with_a_typed_error() -> None:
    registry = Registry()
    region = registry.register(bytearray(1 << 20))
    results: list[int | MoonpoolError] = []
    arrived = threading.Event()

    def silent(sock: socket.socket) -> None:
        arrived.set()
        while sock.recv(65536):
            pass

    with no_leaks(), place(silent) as there:
        client = TransferClient(there.connect)
        local = bytearray(1 << 19)
        thread = threading.Thread(target=lambda: results.extend(client.run([read(region, 0, local)], timeout=60)))
        thread.start()
        assert arrived.wait(5)
        assert eventually(lambda: bool(client._links._busy))
        client.close()
        client.close()
        thread.join()
        (late,) = client.run([read(region, 0, local)], timeout=1)
        assert isinstance(late, PoolClosed)
    registry.close()
    assert isinstance(results[0], ConnectionLost)


def test_a_tls_connection_carries_the_same(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    command = [
        "openssl",
        *words.split(),
        "-addext",
        "subjectAltName=DNS:localhost",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run(command, check=True, capture_output=True)
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(certificate, key)
    theirs = ssl.create_default_context(cafile=str(certificate))
    registry = Registry()
    segment = Segment.create(4 << 20)
    segment.view[:] = pattern(segment.size)
    server = TransferServer(registry)

    def handler(sock: socket.socket) -> None:
        server.serve(ours.wrap_socket(sock, server_side=True))

    with no_leaks(), place(handler) as there:
        region = registry.register(segment.view, fd=segment.fd)
        client = TransferClient(lambda: theirs.wrap_socket(there.connect(), server_hostname="localhost"))
        local = memoryview(bytearray(3 << 20))
        for _ in range(3):
            assert client.run([read(region, 5, local), write(region, 3 << 20 | 64, b"hello")], timeout=10) == [
                3 << 20,
                5,
            ]
            assert local == segment.view[5 : 5 + (3 << 20)]
        assert bytes(segment.view[3 << 20 | 64 :][:5]) == b"hello"
        assert there.connections <= 2
        client.close()
        server.close()
        registry.close()
    segment.close()


VMSPLICE = splice._vmsplice


class Unspliceable:
    """A C library that refuses these pages, as it does for memory of a device."""

    def __init__(self, after: int) -> None:
        self.calls, self._after = 0, after

    def __call__(self, fd: int, iov: object, count: int, flags: int) -> int:
        self.calls += 1
        if self.calls > self._after:
            ctypes.set_errno(errno.EFAULT)
            return -1
        return int(VMSPLICE(fd, iov, count, flags))


@pytest.mark.parametrize("after", [0, 1])
def test_pages_that_cannot_be_sent_in_place_are_copied(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    arena = bytearray(8 << 20)
    region = registry.register(arena)
    library = Unspliceable(after)
    monkeypatch.setattr(splice, "_vmsplice", library)
    with no_leaks(), serving(registry) as there, TransferClient(there.connect, streams=1) as client:
        news = pattern(3 << 20, seed=9)
        assert client.run([write(region, 100, news)], timeout=10) == [len(news)]
        assert arena[100 : 100 + len(news)] == news
        assert library.calls > after
    registry.close()


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1 << 31) - 1, 1 << 31, (1 << 31) + 1])
def test_values_over_two_gib_are_not_truncated(size: int) -> None:
    segment = Segment.create(size)
    for at in (0, (1 << 31) - 5, size - 3):
        segment.view[at : at + 3] = b"end"[: max(0, size - at)]
    registry = Registry()
    region = registry.register(segment.view, fd=segment.fd)
    with serving(registry) as there, TransferClient(there.connect) as client:
        local = bytearray(size)
        assert client.run([read(region, 0, local)], timeout=60) == [size]
        assert hashlib.blake2b(local).digest() == hashlib.blake2b(segment.view).digest()
    registry.close()
    segment.close()
