"""Set up, close, memory, and a store that is not open."""

from __future__ import annotations

import ctypes
import gc
import inspect
import logging
import socket
import time
from typing import Any

import pytest

from moonpool.errors import ConfigError
from moonpool.integrations.mooncake_api import names, settings
from moonpool.integrations.mooncake_api.memory import MemoryPool, MooncakeHostMemAllocator, Ranges, view_at
from moonpool.integrations.mooncake_api.quiet import Quiet
from moonpool.integrations.mooncake_api.store import MooncakeDistributedStore
from moonpool.testing.fake_clock import FakeClock
from tests.integrations.fakes import FakeCluster
from tests.integrations.support import HOME, store_on

GIVEN = {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"}
CALLS: list[tuple[str, tuple[Any, ...], Any]] = [
    ("put", ("k", b"v"), -600),
    ("put_batch", (["k"], [b"v"]), -600),
    ("put_parts", ("k", b"v"), -600),
    ("put_from", ("k", 8, 1), -600),
    ("upsert", ("k", b"v"), -600),
    ("is_exist", ("k",), -600),
    ("batch_is_exist", (["k", "l"],), [-600, -600]),
    ("get", ("k",), b""),
    ("get_batch", (["k", "l"],), [b"", b""]),
    ("get_buffer", ("k",), None),
    ("batch_get_buffer", (["k", "l"],), [None, None]),
    ("get_size", ("k",), -600),
    ("get_into", ("k", 8, 1), -600),
    ("batch_get_into", (["k"], [8], [1]), [-600]),
    ("batch_put_from", (["k"], [8], [1]), [-600]),
    ("batch_put_from_multi_buffers", (["k"], [[8]], [[1]]), [-600]),
    ("batch_get_into_multi_buffers", (["k"], [[8]], [[1]]), [-600]),
    ("get_into_ranges", ([8], [["k"]], [[[0]]], [[[0]]], [[[1]]]), [[[-600]]]),
    ("batch_get_session_start", (["k"],), [-600]),
    ("batch_get_session_end", (["k"],), 0),
    ("batch_put_session_start", (["k"], [1]), [-600]),
    ("batch_put_session_end", (["k"],), [-600]),
    ("remove", ("k",), -600),
    ("batch_remove", (["k"],), [-600]),
    ("remove_all", (), -600),
    ("remove_by_regex", ("k",), -600),
    ("get_replica_desc", ("k",), []),
    ("batch_get_replica_desc", (["k"],), {}),
    ("batch_replica_clear", (["k"],), []),
    ("create_copy_task", ("k", ["s"]), ((0, 0), -600)),
    ("create_move_task", ("k", "s", "t"), ((0, 0), -600)),
    ("query_task", ((1, 2),), (None, -1400)),
    ("register_buffer", (8, 8), -600),
    ("unregister_buffer", (8,), -600),
    ("get_hostname", (), ""),
    ("health_check", (), 1),
    ("allocate_and_mount_segment", (1 << 20,), {"ret": -600, "segment_ids": [], "allocated_size": 0}),
    ("unmount_segment", (["id"],), -600),
    ("alloc_from_mem_pool", (64,), 0),
    ("close", (), 0),
]


@pytest.mark.parametrize(("call", "arguments", "answer"), CALLS, ids=[c for c, _, _ in CALLS])
def test_a_store_that_is_not_open_answers_with_a_code(call: str, arguments: tuple[Any, ...], answer: object) -> None:
    """On the peer 14 of these kill the interpreter."""
    never = MooncakeDistributedStore()
    closed = store_on(FakeCluster(HOME))
    closed.put("k", b"v")
    assert closed.close() == 0
    refused = MooncakeDistributedStore()
    assert refused.setup("localhost", "P2PHANDSHAKE", 1 << 20, 1 << 20, "tcp", "", "127.0.0.1:1") != 0
    for store in (never, closed, refused):
        assert getattr(store, call)(*arguments) == answer


def test_no_master_is_an_error_with_address_and_cause(caplog: pytest.LogCaptureFixture) -> None:
    """The peer says -1 after 90 s."""
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 1 << 20, 1 << 20, "tcp", "", "127.0.0.1:1") == -900
    assert "127.0.0.1:1" in caplog.text
    assert "refused" in caplog.text.lower()


def test_a_master_that_does_not_answer_is_an_error_in_time(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        assert MooncakeDistributedStore().setup({**GIVEN, "master_server_addr": address}) == -901
        assert time.monotonic() - start < 3
    assert address in caplog.text


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("master_server_adr", "master_server_addr"),
        ("globalsegment_size", "global_segment_size"),
        ("tenantid", "tenant_id"),
        ("protocoll", "protocol"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(
    key: str, near: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer takes no notice, and then waits for a master at its default address."""
    assert MooncakeDistributedStore().setup({**GIVEN, key: "x"}) == -600
    assert f"{key}: unknown key" in caplog.text
    assert f"`{near}`" in caplog.text


def test_every_spelling_of_the_dict_is_understood() -> None:
    """LMCache says master_server_address and device_name, the peer's `setup` reads neither."""
    peer = {"master_server_addr": "host:1", "rdma_devices": "mlx5_0", "global_segment_size": "16MB"}
    lmcache = {"master_server_address": "host:1", "device_name": "mlx5_0", "global_segment_size": 16 << 20}
    assert settings.from_dict({**GIVEN, **peer}) == settings.from_dict({**GIVEN, **lmcache})
    with pytest.raises(ConfigError, match="given twice"):
        settings.from_dict({**GIVEN, "master_server_addr": "a:1", "master_server_address": "b:1"})
    for pair in ({"device_name": "", "rdma_devices": "d"}, {"rdma_devices": "d", "device_name": ""}):
        assert settings.from_dict({**GIVEN, **pair}).rdma_devices == "d"
    assert settings.from_dict({**GIVEN, "transfer_timeout": 1, "master_server_address": None}) == settings.from_dict(
        GIVEN
    )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"global_segment_size": "50%"}, "global_segment_size"),
        ({"local_buffer_size": "-1"}, "local_buffer_size"),
        ({"local_buffer_size": 1000}, "local_buffer_size"),
        ({"enable_ssd_offload": "perhaps"}, "enable_ssd_offload"),
        ({"enable_ssd_offload": True}, "ssd_offload_path"),
        ({"client_http_port": "x"}, "client_http_port"),
        ({"local_hostname": " "}, "local_hostname"),
        ({"metadata_server": ""}, "metadata_server"),
        ({"master_server_addr": "etcd://a;b"}, "master_server_addr"),
    ],
)
def test_a_bad_setting_is_named_before_anything_is_tried(changed: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settings.from_dict({**GIVEN, **changed})


def test_positional_and_dict_set_up_mean_the_same() -> None:
    by_place = settings.setup("localhost", "P2PHANDSHAKE", 16 << 20, 16 << 20, "tcp", "", settings.DEFAULT_MASTER)
    assert by_place == settings.from_dict(GIVEN)


def test_unknown_keywords_of_setup_are_type_errors_that_name_them() -> None:
    arguments = ("localhost", "P2PHANDSHAKE", 1 << 20, 1 << 20, "tcp", "", "127.0.0.1:1")
    with pytest.raises(TypeError, match=r"setup\(\).*enable_warp"):
        MooncakeDistributedStore().setup(*arguments, enable_warp=True)
    with pytest.raises(TypeError, match="master_server_addr"):
        MooncakeDistributedStore().setup(*arguments[:6])
    with pytest.raises(TypeError):
        MooncakeDistributedStore().setup("localhost", "P2PHANDSHAKE", "16MB", 1, "tcp", "", "h:1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost", ("localhost", None)),
        ("node-1:12345", ("node-1", 12345)),
        ("[2001:db8::1]:7", ("2001:db8::1", 7)),
        ("2001:db8::1", ("2001:db8::1", None)),
    ],
)
def test_host_names_with_and_without_port(text: str, expected: tuple[str, int | None]) -> None:
    assert names.split(text) == expected
    if expected[1]:
        assert names.join(*expected) == text  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", " ", "http://x:1", "/run/x", "host:port", "host:70000", "0.0.0.0:5", "a b:5"])
def test_what_is_no_host_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        names.split(text)


def test_free_ports_lie_in_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 12300 <= names.free_port() <= 14300
    monkeypatch.setenv("MC_STORE_CLIENT_MIN_PORT", "15000")
    monkeypatch.setenv("MC_STORE_CLIENT_MAX_PORT", "15010")
    assert 15000 <= names.free_port() <= 15010
    monkeypatch.setenv("MC_STORE_CLIENT_MAX_PORT", "14")
    with pytest.raises(ConfigError):
        names.free_port()


def test_set_up_twice_is_refused_and_after_close_it_goes_on() -> None:
    cluster = FakeCluster(HOME)
    store = store_on(cluster)
    store.put("k", b"v")
    assert store.setup({**GIVEN}) == -600
    assert store.get("k") == b"v"
    assert (store.close(), store.close(), store.health_check()) == (0, 0, 1)


def test_registered_memory_does_not_overlap() -> None:
    ranges = Ranges()
    ranges.add(1000, 100)
    ranges.add(1100, 100)
    ranges.add(900, 100)
    for address, size in ((1000, 100), (1050, 10), (950, 100), (1199, 1), (1, 5000), (2000, 0), (0, 10)):
        with pytest.raises(ConfigError):
            ranges.add(address, size)
    assert [ranges.room_at(a) for a in (899, 900, 999, 1000, 1150, 1200)] == [0, 100, 1, 100, 50, 0]
    ranges.remove(1000)
    with pytest.raises(ConfigError):
        ranges.remove(1000)
    ranges.add(1000, 100)


def test_registration_codes() -> None:
    store = store_on(FakeCluster(HOME))
    assert [store.register_buffer(4096, 0), store.register_buffer(4096, 10), store.register_buffer(4100, 10)] == [
        -600,
        0,
        -600,
    ]
    assert [store.unregister_buffer(4096), store.unregister_buffer(4096)] == [0, -600]


def test_host_memory_by_address() -> None:
    allocator = MooncakeHostMemAllocator()
    address = allocator.alloc(1 << 20)
    ctypes.memset(address, 7, 1 << 20)
    assert bytes(view_at(address + (1 << 20) - 2, 2)) == b"\7\7"
    assert (allocator.free(address), allocator.free(address)) == (0, -600)
    assert (allocator.alloc(0), allocator.alloc(1 << 60), allocator.alloc(1 << 70)) == (0, 0, 0)
    assert MooncakeDistributedStore().setup_dummy(1 << 70, 1, "localhost:1") == -600


def test_the_memory_pool_hands_out_aligned_pieces_until_it_is_empty() -> None:
    pool = MemoryPool(256)
    pieces = [pool.alloc(100), pool.alloc(64), pool.alloc(64), pool.alloc(1)]
    assert all(p % 64 == 0 for p in pieces)
    assert [p > 0 for p in pieces] == [True, True, True, False]
    assert len(set(pieces)) == 4


def test_a_dropped_store_leaves_its_pool() -> None:
    left: list[str] = []
    store = store_on(FakeCluster(HOME))
    assert store._joined is not None
    store._joined.on_close(lambda: left.append("left"))
    del store
    gc.collect()
    assert left == ["left"]


def test_a_failing_path_writes_one_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    quiet = Quiet(logging.getLogger("quiet"), clock)
    for _ in range(1000):
        quiet.warning("kind", "it %s", "failed")
    quiet.warning("other kind", "else")
    clock.advance(1.5)
    quiet.warning("kind", "it %s", "failed")
    assert [r.getMessage() for r in caplog.records] == ["it failed", "else", "it failed (and 999 more like it)"]


def test_every_call_of_the_peer_is_there() -> None:
    """Those of its store class, but for the ones that `docs/mooncake-api.md` lists as not supported."""
    assert PEER_CALLS - {n for n, _ in inspect.getmembers(MooncakeDistributedStore) if not n.startswith("_")} == set()


_NAMES = """
alloc_from_mem_pool allocate_and_mount_segment batch_get_buffer batch_get_into batch_get_into_multi_buffer_ranges
batch_get_into_multi_buffers batch_get_replica_desc batch_get_session_end batch_get_session_start batch_get_tensor
batch_get_tensor_into batch_get_tensor_into_cuda batch_get_tensor_with_parallelism
batch_get_tensor_with_parallelism_into batch_get_tensor_with_tp batch_get_tensor_with_tp_into batch_is_exist
batch_pub_tensor batch_pub_tensor_with_tp batch_put_from batch_put_from_multi_buffer_ranges batch_put_from_multi_buffers
batch_put_session_end batch_put_session_revoke batch_put_session_start batch_put_tensor batch_put_tensor_from
batch_put_tensor_with_parallelism batch_put_tensor_with_parallelism_from batch_put_tensor_with_tp
batch_put_tensor_with_tp_from batch_remove batch_replica_clear batch_upsert_from batch_upsert_pub_tensor
batch_upsert_tensor batch_upsert_tensor_from batch_upsert_tensor_with_parallelism
batch_upsert_tensor_with_parallelism_from close create_copy_task create_move_task get get_batch get_buffer get_hostname
get_into get_into_ranges get_replica_desc get_size get_tensor get_tensor_into get_tensor_into_cuda
get_tensor_with_parallelism get_tensor_with_parallelism_into get_tensor_with_tp get_tensor_with_tp_into health_check
init_all is_exist load_tensor_from_safetensor mount_segment pub_tensor pub_tensor_with_tp put put_batch put_from
put_from_with_metadata put_parts put_tensor put_tensor_from put_tensor_with_parallelism put_tensor_with_parallelism_from
put_tensor_with_tp put_tensor_with_tp_from query_task register_buffer remove remove_all remove_by_regex
save_tensor_to_safetensor setup setup_dummy unmount_and_free_segment unmount_local_disk_segment unmount_segment
unregister_buffer upsert upsert_batch upsert_from upsert_parts upsert_pub_tensor upsert_tensor upsert_tensor_from
upsert_tensor_with_parallelism upsert_tensor_with_parallelism_from
"""
PEER_CALLS = set(_NAMES.split())
