"""Layer by layer: get and put sessions, and ranges into registered buffers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moonpool.integrations.mooncake_api.replicate import ReplicateConfig
from moonpool.integrations.mooncake_api.store import MooncakeDistributedStore
from tests.integrations.fakes import FakeCluster
from tests.integrations.support import HOME, Block, store_on


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(HOME)


@pytest.fixture
def store(cluster: FakeCluster) -> Iterator[MooncakeDistributedStore]:
    store = store_on(cluster)
    yield store
    store.close()


def test_a_get_session_reads_ranges_from_one_lease(store: MooncakeDistributedStore, cluster: FakeCluster) -> None:
    target = Block(10)
    store.put("k", b"0123456789")
    opened = len(cluster.leases)
    assert store.batch_get_session_start(["k", "missing"]) == [0, -704]
    for layer in range(2):
        ranges = [[target.ptr + 5 * layer, target.ptr + 5 * layer + 2]], [[2, 3]], [[5 * layer, 5 * layer + 2]]
        assert store.batch_get_into_multi_buffer_ranges(["k"], *ranges) == [5]
    assert target.text == b"0123456789"
    assert len(cluster.leases) == opened + 1
    assert store.batch_get_session_end(["k", "missing"]) == 0
    assert cluster.leases[-1].closed
    assert store.batch_get_into_multi_buffer_ranges(["k"], [[target.ptr]], [[1]], [[0]]) == [-600]


def test_a_sessions_bytes_stay_although_the_object_is_removed(store: MooncakeDistributedStore) -> None:
    target = Block(4)
    store.put("k", b"gone")
    assert store.batch_get_session_start(["k"]) == [0]
    assert store.remove("k") == 0
    assert store.batch_get_into_multi_buffer_ranges(["k"], [[target.ptr]], [[4]], [[0]]) == [4]
    assert target.text == b"gone"


def test_keys_of_one_session_end_one_by_one(store: MooncakeDistributedStore, cluster: FakeCluster) -> None:
    target = Block(1)
    store.put_batch(["a", "b"], [b"A", b"B"])
    assert store.batch_get_session_start(["a", "b", "a"]) == [0, 0, 0]
    store.batch_get_session_end(["a", "a"])
    assert not cluster.leases[-1].closed
    assert store.batch_get_into_multi_buffer_ranges(["a", "b"], [[target.ptr]] * 2, [[1]] * 2, [[0]] * 2) == [-600, 1]
    store.batch_get_session_end(["b"])
    assert cluster.leases[-1].closed


def test_closing_the_store_ends_its_sessions(store: MooncakeDistributedStore, cluster: FakeCluster) -> None:
    store.put("k", b"0123456789")
    store.batch_get_session_start(["k"])
    store.batch_get_session_start(["k"])  # a new one in place of the old one
    assert [lease.closed for lease in cluster.leases] == [True, False]
    assert store.batch_put_session_start(["new"], [10]) == [0]
    store.close()
    assert all(lease.closed for lease in cluster.leases)
    assert cluster.reserved == set()


@pytest.mark.parametrize(
    ("sizes", "offsets"), [([4], [7]), ([11], [0]), ([-1], [0]), ([1], [-1]), ([1, 1], [0]), ([1 << 62], [1 << 62])]
)
def test_ranges_outside_the_object_are_refused(
    store: MooncakeDistributedStore, sizes: list[int], offsets: list[int]
) -> None:
    target = Block(20)
    store.put("k", b"0123456789")
    store.batch_get_session_start(["k"])
    assert store.batch_get_into_multi_buffer_ranges(["k"], [[target.ptr]], [sizes], [offsets]) == [-600]
    assert store.batch_put_session_start(["new"], [10]) == [0]
    assert store.batch_put_from_multi_buffer_ranges(["new"], [[target.ptr]], [sizes], [offsets]) == [-600]
    assert target.text == bytes(20)


def test_a_put_session_is_invisible_until_its_end(store: MooncakeDistributedStore) -> None:
    source = Block(b"0123456789")
    assert store.batch_put_session_start(["k"], [10]) == [0]
    assert store.batch_put_session_start(["k"], [10]) == [-600]
    assert store.batch_put_from_multi_buffer_ranges(["k"], [[source.ptr]], [[5]], [[0]]) == [5]
    assert store.is_exist("k") == 0
    assert store.batch_put_from_multi_buffer_ranges(["k"], [[source.ptr + 5]], [[5]], [[5]]) == [5]
    assert store.batch_put_session_end(["k", "other"]) == [0, -600]
    assert store.get("k") == b"0123456789"
    assert store.batch_put_from_multi_buffer_ranges(["k"], [[source.ptr]], [[5]], [[0]]) == [-600]


def test_a_revoked_put_session_leaves_nothing(store: MooncakeDistributedStore, cluster: FakeCluster) -> None:
    assert store.batch_put_session_start(["k", "l"], [10, 10]) == [0, 0]
    assert store.batch_put_session_revoke(["k", "other"]) == [0, -600]
    assert store.batch_put_session_end(["k"]) == [-600]
    assert (store.is_exist("k"), cluster.reserved) == (0, {"l"})


def test_a_put_session_for_what_exists_says_so(store: MooncakeDistributedStore) -> None:
    store.put("k", b"there")
    assert store.batch_put_session_start(["k", "", "empty", "new"], [5, 5, 0, 5]) == [-705, -600, -600, 0]


def test_groups_of_a_put_session_stay_with_their_keys(store: MooncakeDistributedStore, cluster: FakeCluster) -> None:
    config = ReplicateConfig(group_ids=["a", "b", "c"])
    assert store.batch_put_session_start(["x", "", "z"], [1, 1, 1], config) == [0, -600, 0]
    assert cluster.seen[-1].groups == ("a", "c")


def test_ranged_gets_write_only_inside_registered_buffers(store: MooncakeDistributedStore) -> None:
    target = Block(8)
    store.put("k", b"0123456789")
    one = ([["k"]], [[[0]]], [[[2]]], [[[4]]])
    assert store.get_into_ranges([target.ptr], *one) == [[[-600]]]
    assert store.register_buffer(target.ptr, 8) == 0
    assert store.get_into_ranges([target.ptr], *one) == [[[4]]]
    assert store.get_into_ranges([target.ptr + 4], *one) == [[[4]]]
    assert target.text == b"23452345"
    assert store.get_into_ranges([target.ptr + 5], *one) == [[[-600]]]
    assert store.get_into_ranges([target.ptr], [["k", "no"]], [[[0], [1, 2]]], [[[8], [0, 0]]], [[[4], [1, 1]]]) == [
        [[-600], [-704, -704]]
    ]
    assert store.get_into_ranges([target.ptr], [["k"]], [[[0]]], [[[0, 1]]], [[[]]]) == [[[-600, -600]]]
    assert store.get_into_ranges([target.ptr], [], [], [], []) == [[[-600]]]
