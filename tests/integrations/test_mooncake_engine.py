"""The drop-in for `mooncake.engine`: codes, addresses, names, and what happens when peers come and go."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator

import pytest

from moonpool.integrations.mooncake_api.engine import TransferEngine
from moonpool.integrations.mooncake_api.engine_types import Read, SharedSegment, TransferNotify, TransferOpcode, Write
from moonpool.store.metadata.server import MetadataServer
from moonpool.testing.leaks import eventually, no_leaks
from tests.transfer.support import pattern

SIZE = 1 << 20


class Engine(TransferEngine):
    """With a name for peers, a buffer, and an end."""

    def __init__(self, name: str = "127.0.0.1", server: str = "P2PHANDSHAKE") -> None:
        super().__init__()
        assert self.initialize(name, server, "tcp", "") == 0
        self.name = f"127.0.0.1:{self.get_rpc_port()}" if server == "P2PHANDSHAKE" else name
        self.buffer = self.allocate_managed_buffer(SIZE)
        assert self.buffer

    def content(self, offset: int, size: int) -> bytes:
        return self.read_bytes_from_buffer(self.buffer + offset, size)

    def fill(self, data: bytes, offset: int = 0) -> None:
        assert self.write_bytes_to_buffer(self.buffer + offset, data, len(data)) == 0


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    """An engine has no close, here as in the peer; it ends with its last reference."""
    gc.collect()
    with no_leaks():
        yield
        gc.collect()


def test_bytes_travel_both_ways_by_absolute_address() -> None:
    a, b = Engine(), Engine()
    b.fill(pattern(SIZE))
    assert a.get_first_buffer_address(b.name) == b.buffer
    assert a.transfer_sync_read(b.name, a.buffer + 10, b.buffer + 1000, 5000) == 0
    assert a.content(10, 5000) == pattern(SIZE)[1000:6000]
    assert a.content(0, 10) == bytes(10)
    a.fill(b"hello")
    assert a.transfer_sync(b.name, a.buffer, b.buffer + 7, 5, Write) == 0
    assert b.content(6, 7) == pattern(SIZE)[6:7] + b"hello" + pattern(SIZE)[12:13]
    assert a.transfer_sync(b.name, a.buffer, b.buffer, 6, opcode=Read) == 0
    assert a.content(0, 6) == pattern(SIZE)[:6]


@pytest.mark.parametrize("read", [False, True])
def test_batches_synchronous_and_not(read: bool) -> None:
    a, b = Engine(), Engine()
    (b if read else a).fill(pattern(SIZE))
    ours = [a.buffer + 100 * i for i in range(100)]
    theirs = [b.buffer + 200 * i for i in range(100)]
    sizes = [i % 90 + 1 for i in range(100)]
    sync = a.batch_transfer_sync_read if read else a.batch_transfer_sync_write
    later = a.batch_transfer_async_read if read else a.batch_transfer_async_write
    assert sync(b.name, ours, theirs, sizes) == 0
    id_ = later(b.name, ours, theirs, sizes)
    assert id_ > 0
    assert a.get_batch_transfer_status([id_]) == 0
    assert a.get_batch_transfer_status([id_]) == -1  # it was asked for already
    for i, size in enumerate(sizes):
        assert a.content(100 * i, size) == b.content(200 * i, size)
        assert a.content(100 * i, size) == pattern(SIZE)[(200 if read else 100) * i :][:size]
    id_ = a.batch_transfer_async(b.name, ours, theirs, sizes, TransferOpcode.Read)
    assert eventually(lambda: a.transfer_check_status(id_) == 1)
    assert a.transfer_check_status(id_) == -1


def test_memory_that_the_target_did_not_register_is_refused() -> None:
    a, b = Engine(), Engine()
    end = b.buffer + SIZE
    for address, size in ((end, 1), (end - 1, 2), (b.buffer - 1, 2), (16, 16)):
        assert a.transfer_sync_write(b.name, a.buffer, address, size) == -1
        assert a.transfer_sync_read(b.name, a.buffer, address, size) == -1
        id_ = a.transfer_submit_write(b.name, a.buffer, address, size)
        assert id_ > 0
        assert a.get_batch_transfer_status([id_]) == -1
    stray = ctypes.create_string_buffer(b"not registered here", 32)
    assert a.transfer_sync_write(b.name, ctypes.addressof(stray), b.buffer, 19) == 0  # the source need not be
    assert b.content(0, 19) == b"not registered here"


def test_misuse_answers_with_a_code_and_moves_nothing() -> None:
    a, b = Engine(), Engine()
    assert a.batch_transfer_sync_write(b.name, [a.buffer], [b.buffer, b.buffer + 9], [1, 1]) == -1
    assert a.batch_transfer_sync_read(b.name, [a.buffer, a.buffer + 1], [b.buffer, b.buffer], [2, 2]) == -1
    assert a.transfer_sync_write(b.name, 0, b.buffer, 4) == -1
    assert a.transfer_sync_write("", a.buffer, b.buffer, 4) == -1
    assert a.transfer_sync_write("no-port", a.buffer, b.buffer, 4) == -1
    assert a.write_bytes_to_buffer(a.buffer, b"abc", 4) == -1
    assert a.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1
    assert b.content(0, 16) == bytes(16)


def test_registration_codes() -> None:
    a = Engine()
    arena = ctypes.create_string_buffer(10000)
    at = ctypes.addressof(arena)
    assert a.register_memory(at, 0) != 0
    assert a.register_memory(0, 16) != 0
    assert a.register_memory(at, 5000) == 0
    assert a.register_memory(at + 4999, 10) == -7
    assert a.unregister_memory(at + 1) == -3
    assert a.unregister_memory(at) == 0
    assert a.unregister_memory(at) == -3


def test_a_batch_of_registrations_is_all_or_none() -> None:
    a, b = Engine(), Engine()
    arena = ctypes.create_string_buffer(10000)
    at = ctypes.addressof(arena)
    starts, sizes = [at, at + 1000, at + 500, at + 3000, at + 4000], [100, 100, 600, 100, 100]
    assert a.batch_register_memory(starts, sizes) == -7  # the third overlaps the second
    for start in starts:
        assert b.transfer_sync_write(a.name, b.buffer, start, 10) == -1
    sizes[2] = 100
    assert a.batch_register_memory(starts, sizes) == 0
    assert a.batch_register_memory([1], []) == -1
    assert b.batch_transfer_sync_write(a.name, [b.buffer] * 5, starts, [10] * 5) == 0
    assert a.batch_unregister_memory(starts) == 0
    assert a.batch_unregister_memory(starts) == -3


def test_memory_that_was_given_back_is_out_of_reach() -> None:
    a, b = Engine(), Engine()
    more = b.allocate_managed_buffer(SIZE)
    assert a.transfer_sync_write(b.name, a.buffer, more, 8) == 0
    assert b.free_managed_buffer(more, SIZE) == 0
    assert a.transfer_sync_write(b.name, a.buffer, more, 8) == -1
    assert b.free_managed_buffer(more, SIZE) == -3


def test_before_initialize_every_call_answers() -> None:
    engine = TransferEngine()
    assert engine.get_rpc_port() == -1
    assert engine.register_memory(4096, 10) == -1
    assert engine.unregister_memory(4096) == -1
    assert engine.allocate_managed_buffer(10) == 0
    assert engine.get_first_buffer_address("127.0.0.1:9") == 0
    assert engine.transfer_sync_write("127.0.0.1:9", 1, 1, 1) == -1
    assert engine.batch_transfer_async_read("127.0.0.1:9", [1], [1], [1]) == 0
    assert engine.transfer_check_status(1) == -1
    assert engine.get_batch_transfer_status([1]) == -1
    assert engine.send_probe("127.0.0.1:9") != 0
    assert engine.get_notifies() == []


@pytest.mark.parametrize(
    ("server", "protocol"),
    [
        ("etcd://127.0.0.1:2379", "tcp"),
        ("127.0.0.1:2379", "tcp"),
        ("P2PHANDSHAKE", "efa"),
        ("http://127.0.0.1:9/metadata", "tcp"),
    ],
)
def test_what_is_not_offered_fails_at_once(server: str, protocol: str) -> None:
    assert TransferEngine().initialize("127.0.0.1", server, protocol, "") == -1


def test_what_makes_no_sense_here_says_so() -> None:
    with pytest.raises(NotImplementedError, match="SharedSegment"):
        SharedSegment()
    with pytest.raises(NotImplementedError, match="pointer"):
        TransferEngine().get_engine_ptr()
    assert TransferEngine().get_local_topology() == "{}"


def test_notes_come_after_their_bytes_in_order() -> None:
    a, b = Engine(), Engine()
    for i in range(3):
        a.fill(b"%d" % i)
        assert a.transfer_sync(b.name, a.buffer, b.buffer + i, 1, Write, TransferNotify("page", str(i))) == 0
    assert [(n.name, n.msg) for n in b.get_notifies()] == [("page", "0"), ("page", "1"), ("page", "2")]
    assert b.content(0, 3) == b"012"
    assert b.get_notifies() == []
    failed = a.transfer_sync(b.name, a.buffer, 16, 1, Write, TransferNotify("page", "never"))
    assert failed == -1
    assert b.get_notifies() == []


def test_an_unknown_peer_is_a_failed_submit_and_a_failed_probe() -> None:
    a = Engine()
    assert a.batch_transfer_async_write("127.0.0.1:9", [a.buffer], [1], [16]) == 0
    assert a.transfer_submit_write("127.0.0.1:9", a.buffer, 1, 16) == 0
    assert a.send_probe("127.0.0.1:9") == -102
    assert a.get_first_buffer_address("127.0.0.1:9") == 0


def test_names_through_the_metadata_server_and_the_heir_of_a_dead_name() -> None:
    with MetadataServer() as server:
        a, b = Engine("127.0.0.1:23451", server.url), Engine("127.0.0.1:23452", server.url)
        b.fill(b"first")
        assert a.transfer_sync_read(b.name, a.buffer, a.get_first_buffer_address(b.name), 5) == 0
        assert a.content(0, 5) == b"first"
        assert a.send_probe("127.0.0.1:23459") == -200
        assert TransferEngine().initialize(b.name, server.url, "tcp", "") == -1  # its owner lives
        stale = dict(server.table.values)
        del b
        gc.collect()
        assert "mooncake/rpc_meta/127.0.0.1:23452" not in server.table.values  # a clean end withdraws the name
        server.table.values.update(stale)  # a killed one does not
        heir = Engine("127.0.0.1:23452", server.url)
        heir.fill(b"second")
        assert a.get_first_buffer_address(heir.name) == heir.buffer
        assert a.transfer_sync_read(heir.name, a.buffer, heir.buffer, 6) == 0  # found anew, though it moved
        assert a.content(0, 6) == b"second"
        del a, heir
        gc.collect()


def test_transfers_let_other_threads_run() -> None:
    a, b = Engine(), Engine()
    stop, turns = threading.Event(), [0]

    def count() -> None:
        while not stop.is_set():
            turns[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = turns[0]
        for _ in range(20):
            assert a.transfer_sync_read(b.name, a.buffer, b.buffer, SIZE) == 0
        assert turns[0] > before
    finally:
        stop.set()
        thread.join()


def test_other_machines_are_served_only_with_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONPOOL_SECRET_FILE", raising=False)
    engine = TransferEngine()
    assert engine.initialize("192.0.2.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine._node is not None
    assert engine._node.address.host == "127.0.0.1"
