"""The drop-in over real masters, messengers and dummy clients."""

from __future__ import annotations

import http.client
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.integrations.mooncake_api.replicate import ReplicateConfig
from moonpool.integrations.mooncake_api.store import MooncakeDistributedStore
from moonpool.testing.leaks import eventually, no_leaks
from tests.integrations.servers import MIB, Peers, free_port
from tests.integrations.support import Block

pytestmark = pytest.mark.cluster


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    """Their folder has a short name: a Unix socket's path holds 107 bytes, and the drop-in's own names are long."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, no_leaks():
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        peers = Peers(Path(folder))
        yield peers
        peers.close()


def page(server: Peers, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.metrics, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def test_two_stores_share_what_they_put(peers: Peers) -> None:
    first, second = peers.setup(), peers.setup()
    assert first.get_hostname() != second.get_hostname()
    assert first.put("k", b"value") == 0
    assert eventually(lambda: second.is_exist("k") == 1)
    assert (second.get("k"), second.get_size("k")) == (b"value", 5)
    assert second.put("k", b"other") == 0
    assert first.get("k") == b"value"
    assert second.remove("k") == 0
    assert (first.is_exist("k"), first.get("k")) == (0, b"")


def test_the_admin_page_names_the_segments_of_stores_that_are_set_up(peers: Peers) -> None:
    """SGLang's `check_server` waits until this page is not empty."""
    assert page(peers, "/get_all_segments") == ""
    store = peers.setup(hostname="localhost:12999")
    assert page(peers, "/get_all_segments") == "localhost:12999\n"
    store.put("k", b"v")
    assert eventually(lambda: page(peers, "/get_all_keys") == "k\n")
    assert "localhost:12999" in page(peers, "/query_key?key=k")
    store.close()
    assert eventually(lambda: page(peers, "/get_all_segments") == "")


def test_a_client_may_come_before_the_first_segment(peers: Peers) -> None:
    client = peers.setup(segment=0)
    assert (client.put("k", b"v"), client.is_exist("k"), client.get("k"), client.get_size("k")) == (-200, 0, b"", -704)
    assert (client.health_check(), client.remove_all()) == (0, 0)
    store = peers.setup()
    assert eventually(lambda: client.put("k", b"v") == 0)
    assert store.get("k") == b"v"


def test_a_name_that_is_taken_is_an_error_that_names_it(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    peers.setup(hostname="localhost:12998")
    second = MooncakeDistributedStore()
    arguments = ("localhost:12998", "P2PHANDSHAKE", 64 * MIB, MIB, "tcp", "", peers.address)
    assert second.setup(*arguments) == -600
    assert "12998" in caplog.text


def test_a_port_that_the_callers_engine_holds_is_only_a_name(peers: Peers) -> None:
    """SGLang passes its transfer engine and that engine's host:port."""
    with socket.create_server(("127.0.0.1", 0)) as engine:
        name = f"localhost:{engine.getsockname()[1]}"
        store = peers.setup(hostname=name, engine=object())
        assert (store.get_hostname(), store.put("k", b"v"), store.get("k")) == (name, 0, b"v")


def test_many_stores_choose_different_ports(peers: Peers) -> None:
    stores: list[MooncakeDistributedStore] = []
    threads = [threading.Thread(target=lambda: stores.append(peers.setup(segment=MIB))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({store.get_hostname() for store in stores}) == 8


def test_a_masters_restart_loses_nothing(peers: Peers) -> None:
    """The peer: 0 of 50 keys, and each call hangs for more than 4 s meanwhile."""
    store = peers.setup()
    keys = [f"k{i}" for i in range(50)]
    assert store.put_batch(keys, [k.encode() for k in keys]) == 0
    peers.master.kill()
    start = time.monotonic()
    assert store.get_batch(keys) == [k.encode() for k in keys]
    assert time.monotonic() - start < 4
    peers.master.start()
    assert eventually(lambda: store.health_check() == 0)
    assert store.batch_is_exist(keys) == [1] * 50
    assert eventually(lambda: store.put("after", b"v") == 0)
    other = peers.setup()
    assert eventually(lambda: other.get_batch(keys) == [k.encode() for k in keys])


def test_a_full_segment_evicts_and_never_refuses_what_fits(peers: Peers) -> None:
    """The peer refuses half of the puts of 1 MiB + 304 B although all could be evicted."""
    store, value = peers.setup(segment=16 * MIB), bytes(MIB + 304)
    assert [store.put(f"k{i}", value) for i in range(64)] == [0] * 64
    assert store.get("k63") == value
    assert store.is_exist("k0") == 0


def test_an_upsert_is_never_torn(peers: Peers) -> None:
    """The peer writes in place under its readers: 428 of 631 reads were mixed."""
    writer, reader = peers.setup(), peers.setup(segment=0)
    size, stop = 2 * MIB, threading.Event()
    target = Block(size)
    assert writer.put("k", bytes(size)) == 0

    def write() -> None:
        values = (b"\xff" * size, bytes(size))
        for i in range(40):
            assert writer.upsert("k", values[i % 2]) == 0
        stop.set()

    thread = threading.Thread(target=write)
    thread.start()
    mixed = reads = 0
    while not stop.is_set():
        if reader.get_into("k", target.ptr, size) == size:
            reads += 1
            mixed += len(set(target.text)) > 1
    thread.join()
    assert (mixed, reads > 0) == (0, True)


def test_dummy_clients_use_the_mooncake_client_of_their_host(peers: Peers) -> None:
    client = peers.client()
    stores = [MooncakeDistributedStore(), MooncakeDistributedStore()]
    for store in stores:
        assert store.setup_dummy(MIB, MIB, f"127.0.0.1:{client.port}") == 0
    first, second = stores
    address = first.alloc_from_mem_pool(1000)
    assert first.register_buffer(address, 1000) == 0
    assert first.put_from("k", address, 1000) == 0
    assert (second.get("k"), second.health_check()) == (bytes(1000), 0)
    assert [r.get_memory_descriptor().buffer_descriptor.transport_endpoint for r in second.get_replica_desc("k")] == [
        f"127.0.0.1:{client.port}"
    ]
    for store in stores:
        assert store.close() == 0
    assert client.stop() == 0
    assert MooncakeDistributedStore().setup_dummy(MIB, MIB, f"127.0.0.1:{client.port}") == -900


def test_no_mooncake_client_is_an_error_with_its_address(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    assert MooncakeDistributedStore().setup_dummy(MIB, MIB, "127.0.0.1:1") == -900
    assert "127.0.0.1:1" in caplog.text
    assert MooncakeDistributedStore().setup_dummy(MIB, MIB, "127.0.0.1") == -600


def test_capacity_comes_and_goes(peers: Peers) -> None:
    store = peers.setup(segment=0)
    mounted = store.allocate_and_mount_segment(17 * MIB)
    assert (mounted["ret"], mounted["allocated_size"]) == (0, 32 * MIB)
    assert eventually(lambda: store.put("big", bytes(16 * MIB)) == 0)
    ids = mounted["segment_ids"]
    assert isinstance(ids, list)
    assert store.unmount_segment(["unknown", *ids]) == -600
    assert store.is_exist("big") == 1
    assert store.unmount_segment(ids) == 0
    assert eventually(lambda: store.is_exist("big") == 0)
    assert store.mount_segment("/dev/shm/x", MIB) == {"ret": -1012, "segment_ids": []}


def test_replicas_survive_one_holder(peers: Peers) -> None:
    first, second = peers.setup(), peers.setup()
    config = ReplicateConfig(replica_num=2)
    assert eventually(
        lambda: first.put(f"k{time.monotonic()}", b"v", config) == 0 and len(first.pool.messengers()) == 2
    )
    assert first.put("both", b"value", config) == 0
    assert eventually(lambda: len(second.get_replica_desc("both")) == 2)
    first.close()
    assert eventually(lambda: second.get("both") == b"value")


def test_tenants_do_not_see_each_other(peers: Peers) -> None:
    mine, theirs = peers.setup(tenant_id="mine"), peers.setup(tenant_id="theirs")
    assert mine.put("k", b"mine") == 0
    assert theirs.put("k", b"theirs") == 0
    assert (mine.get("k"), theirs.get("k")) == (b"mine", b"theirs")
    assert theirs.remove_all() == 1
    assert mine.get("k") == b"mine"


def test_evicted_objects_are_read_from_disk(peers: Peers, tmp_path: Path) -> None:
    folder = str(tmp_path / "disk")
    store = peers.setup(segment=16 * MIB, enable_ssd_offload=True, ssd_offload_path=folder)
    values = {f"k{i}": os.urandom(MIB) for i in range(40)}
    for key, value in values.items():
        assert store.put(key, value) == 0
        time.sleep(0.01)  # the disk is written behind; a burst that it cannot follow is evicted without it
    assert eventually(lambda: sum(store.batch_is_exist(list(values))) > 20)
    kept = [k for k in values if store.is_exist(k)]
    assert all(store.get(k) in (values[k], b"") for k in kept)
    assert sum(store.get(k) == values[k] for k in kept) > 20


def test_a_stores_own_pages(peers: Peers) -> None:
    port = free_port()
    store = peers.setup(enable_client_http_server=True, client_http_port=port)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/health")
    assert connection.getresponse().read() == b'{"status":"healthy","code":0}'
    connection.close()
    store.close()


def test_threads_share_a_store(peers: Peers) -> None:
    store = peers.setup()
    wrong: list[str] = []

    def work(number: int) -> None:
        value = bytes([number]) * MIB
        block = Block(MIB)
        for i in range(10):
            key = f"{number}-{i}"
            if store.put(key, value) or store.get_into(key, block.ptr, MIB) != MIB or block.text != value:
                wrong.append(key)
            if store.remove(key):
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
