"""Puts and gets: codes, lengths, and what the peer gets wrong."""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Iterator

import numpy as np
import pytest

from moonpool.errors import ConnectionLost, DeadlineExceeded
from moonpool.integrations.mooncake_api.replicate import ReplicateConfig, SoftPinAction
from moonpool.integrations.mooncake_api.store import MooncakeDistributedStore
from moonpool.types import Pin
from tests.integrations.fakes import FakeCluster
from tests.integrations.support import HOME, OTHER, Block, store_on


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(HOME, OTHER)


@pytest.fixture
def store(cluster: FakeCluster) -> Iterator[MooncakeDistributedStore]:
    store = store_on(cluster)
    yield store
    store.close()


def test_put_get_size_and_remove(store: MooncakeDistributedStore) -> None:
    assert store.put("k", b"value") == 0
    assert (store.get("k"), store.get_size("k"), store.is_exist("k")) == (b"value", 5, 1)
    assert store.remove("k") == 0
    assert (store.get("k"), store.get_size("k"), store.is_exist("k"), store.remove("k")) == (b"", -704, 0, -704)


def test_results_are_plain_ints(store: MooncakeDistributedStore) -> None:
    block = Block(b"12345")
    results = [
        store.put("k", b"v"),
        store.is_exist("k"),
        store.get_size("k"),
        store.get_size("missing"),
        store.get_into("k", block.ptr, block.size),
        store.get_into("missing", block.ptr, block.size),
        store.remove("missing"),
        store.remove_all(),
        *store.batch_is_exist(["k", "", "missing"]),
        *store.batch_put_from(["a", ""], [block.ptr] * 2, [block.size] * 2),
        *store.batch_get_into(["a", ""], [block.ptr] * 2, [block.size] * 2),
        *store.batch_put_from_multi_buffers(["b"], [[block.ptr]], [[block.size]]),
        *store.batch_get_into_multi_buffers(["b", "no"], [[block.ptr]] * 2, [[block.size]] * 2),
    ]
    assert [type(r) for r in results] == [int] * len(results)


def test_the_first_put_wins_also_where_another_segment_has_the_key(cluster: FakeCluster) -> None:
    first, second = store_on(cluster, HOME), store_on(cluster, OTHER)
    assert first.put("k", b"first") == 0
    assert second.put("k", b"second") == 0
    assert second.get("k") == first.get("k") == b"first"
    assert cluster.holders("k") == [HOME]


def test_a_key_that_another_writer_is_putting_counts_as_there(cluster: FakeCluster) -> None:
    store = store_on(cluster)
    cluster.reserved.add("k")
    assert store.put("k", b"mine") == 0
    assert store.upsert("k", b"mine") == -705
    assert store.is_exist("k") == 0


@pytest.mark.parametrize(
    "value",
    [
        np.arange(10, dtype=np.int64),
        array("d", [1.5, 2.5]),
        memoryview(bytes(64)).cast("Q"),
        np.ones((3, 4), np.float32),
    ],
)
def test_all_bytes_of_a_value_are_stored_whatever_its_items(store: MooncakeDistributedStore, value: object) -> None:
    """The peer takes the number of items for the number of bytes: 10 of 80 bytes, and says 0."""
    expected = memoryview(value).tobytes()  # type: ignore[arg-type]
    assert store.put("one", value) == 0
    assert store.put_batch(["batch"], [value]) == 0
    assert store.put_parts("parts", value, value) == 0
    assert store.upsert("upserted", value) == 0
    assert store.get("one") == store.get("batch") == store.get("upserted") == expected
    assert store.get("parts") == expected * 2


def test_a_value_that_lies_scattered_is_stored_in_its_order(store: MooncakeDistributedStore) -> None:
    value = np.arange(24, dtype=np.uint8).reshape(4, 6)[:, ::2]
    assert store.put("k", value) == 0
    assert store.get("k") == value.tobytes()


def test_empty_values_and_impossible_keys_are_refused_each_alone(store: MooncakeDistributedStore) -> None:
    block = Block(b"12345")
    assert store.put("k", b"") == -600
    assert store.put("", b"v") == -600
    assert store.put("\ud800", b"v") == -600
    keys = ["good", "", "k" * 5000, "fine"]
    assert store.batch_put_from(keys, [block.ptr] * 4, [block.size] * 4) == [0, -600, -600, 0]
    assert store.batch_is_exist(keys) == [1, 0, 0, 1]
    assert store.batch_get_into(keys, [block.ptr] * 4, [block.size] * 4) == [5, -704, -704, 5]
    assert store.get_batch(keys) == [b"12345", b"", b"", b"12345"]
    assert store.batch_remove(keys) == [0, -704, -704, 0]


@pytest.mark.parametrize("value", ["text", None, 5])
def test_what_is_no_buffer_is_a_type_error(store: MooncakeDistributedStore, value: object) -> None:
    with pytest.raises(TypeError):
        store.put("k", value)
    with pytest.raises(TypeError):
        store.put(5, b"v")  # type: ignore[arg-type]
    assert store.is_exist("k") == 0


def test_an_unknown_keyword_is_a_type_error_that_names_it(store: MooncakeDistributedStore) -> None:
    """Callers retry without what the message names."""
    with pytest.raises(TypeError, match="session_ids"):
        store.put("k", b"v", session_ids=["s"])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="session_ids"):
        store.batch_put_from(["k"], [1], [1], session_ids=["s"])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="config"):
        store.put("k", b"v", config={"replica_num": 2})  # type: ignore[arg-type]


def test_lists_of_different_length_refuse_the_batch(store: MooncakeDistributedStore) -> None:
    block = Block(b"12345")
    assert store.batch_put_from(["a", "b"], [block.ptr], [5]) == [-600, -600]
    assert store.batch_get_into(["a", "b"], [block.ptr] * 2, [5]) == [-600, -600]
    assert store.put_batch(["a", "b"], [b"1"]) == -600
    assert store.batch_put_from([], [], []) == []
    assert store.batch_is_exist([]) == []
    assert store.batch_is_exist(["a", "b"]) == [0, 0]


def test_a_key_that_comes_twice_is_put_once_and_both_answer_0(store: MooncakeDistributedStore) -> None:
    first, second = Block(b"first"), Block(b"other")
    assert store.batch_put_from(["k", "k"], [first.ptr, second.ptr], [5, 5]) == [0, 0]
    assert store.get("k") == b"first"
    assert store.batch_upsert_from(["k", "k"], [first.ptr, second.ptr], [5, 5]) == [0, 0]
    assert store.get("k") == b"other"


def test_pointers_in_and_out(store: MooncakeDistributedStore) -> None:
    source, target = Block(b"0123456789"), Block(20)
    assert store.put_from("k", source.ptr, 10) == 0
    assert store.get_into("k", target.ptr, 20) == 10
    assert target.text[:10] == b"0123456789"
    assert store.get_into("k", target.ptr, 9) == -600
    assert store.put_from_with_metadata("m", source.ptr + 4, source.ptr, 6, 4) == 0
    assert store.get("m") == b"0123456789"
    assert store.put_from("null", 0, 10) == -600


def test_multi_buffers_must_have_the_objects_size(store: MooncakeDistributedStore) -> None:
    source, target = Block(b"0123456789"), Block(20)
    pointers = [[source.ptr, source.ptr + 4]]
    assert store.batch_put_from_multi_buffers(["k"], pointers, [[4, 6]]) == [0]
    assert store.get("k") == b"0123456789"
    halves = [[target.ptr + 10, target.ptr]]
    assert store.batch_get_into_multi_buffers(["k"], halves, [[5, 5]], True) == [10]
    assert target.text[:15] == b"56789" + bytes(5) + b"01234"
    assert store.batch_get_into_multi_buffers(["k"], halves, [[5, 4]]) == [-600]
    assert store.batch_get_into_multi_buffers(["k"], halves, [[5, 6]]) == [-800]
    assert store.batch_get_into_multi_buffers(["no"], halves, [[5, 6]]) == [-704]


def test_buffer_handles_answer_the_buffer_protocol(store: MooncakeDistributedStore) -> None:
    store.put("k", b"0123456789")
    handle, missing = store.batch_get_buffer(["k", "missing"])
    assert missing is None
    assert handle is not None
    assert (bytes(handle), handle.size(), len(handle)) == (b"0123456789", 10, 10)
    assert ctypes.string_at(handle.ptr() + 2, 3) == b"234"
    store.remove("k")
    assert bytes(memoryview(handle)) == b"0123456789"


def test_reading_closes_its_lease(store: MooncakeDistributedStore, cluster: FakeCluster) -> None:
    block = Block(10)
    store.put("k", b"0123456789")
    store.batch_get_into_multi_buffers(["k"], [[block.ptr]], [[10]])
    store.get_buffer("k")
    store.get("k")
    assert cluster.leases
    assert all(lease.closed for lease in cluster.leases)


def test_a_full_pool_is_minus_200_which_engines_take_for_back_pressure(store: MooncakeDistributedStore) -> None:
    assert store.put("k", bytes(2 << 20)) == -200


def test_what_the_pool_says_becomes_a_code(store: MooncakeDistributedStore, cluster: FakeCluster) -> None:
    cluster.failure = ConnectionLost("gone")
    assert (store.put("k", b"v"), store.is_exist("k"), store.get("k"), store.health_check()) == (-900, -900, b"", 2)
    assert store.batch_is_exist(["a", "b"]) == [-900, -900]
    cluster.failure = DeadlineExceeded("late")
    assert (store.get_size("k"), store.remove_all(), store.get_buffer("k")) == (-901, -901, None)


def test_upsert_replaces_and_keeps_a_soft_pin_unless_told(cluster: FakeCluster) -> None:
    store = store_on(cluster)
    pinned = ReplicateConfig()
    pinned.soft_pin_action, pinned.soft_pin_ttl_ms = SoftPinAction.ENABLE, 1500
    assert store.put("k", b"one", pinned) == 0
    assert (cluster.seen[-1].pin, cluster.seen[-1].soft_pin_ttl_s) == (Pin.SOFT, 1.5)
    assert store.upsert("k", b"two") == 0
    assert (store.get("k"), cluster.seen[-1].pin, cluster.seen[-1].replace) == (b"two", Pin.SOFT, True)
    disable = ReplicateConfig(soft_pin_action=SoftPinAction.DISABLE)
    assert store.upsert_parts("k", b"th", b"ree", config=disable) == 0
    assert (store.get("k"), cluster.seen[-1].pin) == (b"three", Pin.NONE)


def test_a_store_without_local_buffer_takes_no_values_but_pointers(cluster: FakeCluster) -> None:
    store, block = store_on(cluster), Block(b"12345")
    store.local_buffer_size = 0
    assert (store.put("k", b"v"), store.upsert("k", b"v"), store.is_exist("k")) == (-600, -600, 0)
    assert store.put_from("k", block.ptr, 5) == 0
    assert store.get("k") == b"12345"


def test_threads_get_their_own_bytes(store: MooncakeDistributedStore) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        block, target = Block(bytes([number]) * 100_000), Block(100_000)
        for i in range(10):
            key = f"{number}-{i}"
            if store.put_from(key, block.ptr, block.size) or store.get_into(key, target.ptr, target.size) != 100_000:
                wrong.append(key)
            if target.text != block.text or store.remove(key):
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
