"""Removal, replicas and tasks."""

from __future__ import annotations

import pytest

from moonpool.integrations.mooncake_api.descriptors import ReplicaStatus, TaskStatus, TaskType
from moonpool.integrations.mooncake_api.replicate import ReplicateConfig
from tests.integrations.fakes import FakeCluster
from tests.integrations.support import HOME, OTHER, store_on


def test_a_hard_pinned_object_goes_only_by_force() -> None:
    """The peer says so and removes it."""
    store = store_on(FakeCluster(HOME))
    assert store.put("pinned", b"v", ReplicateConfig(with_hard_pin=True)) == 0
    assert store.put("plain", b"v") == 0
    assert (store.remove("pinned"), store.batch_remove(["pinned", "no"])) == (-706, [-706, -704])
    assert (store.remove_all(), store.is_exist("pinned")) == (1, 1)
    assert (store.remove_all(force=True), store.is_exist("pinned")) == (1, 0)


def test_removal_by_pattern() -> None:
    store = store_on(FakeCluster(HOME))
    store.put_batch(["a1", "a2", "b1"], [b"v"] * 3)
    assert (store.remove_by_regex("^a"), store.batch_is_exist(["a1", "a2", "b1"])) == (2, [0, 0, 1])
    assert store.remove_by_regex("(") == -600


def test_replicas_go_where_they_are_wanted_and_are_described() -> None:
    cluster = FakeCluster(HOME, OTHER)
    store = store_on(cluster)
    assert store.put("k", b"12345", ReplicateConfig(preferred_segment=OTHER)) == 0
    assert store.put("both", b"1", ReplicateConfig(replica_num=2)) == 0
    found = store.get_replica_desc("k")[0]
    assert found.status is ReplicaStatus.COMPLETE
    assert (found.is_memory_replica(), found.is_disk_replica(), found.is_local_disk_replica()) == (True, False, False)
    where = found.get_memory_descriptor().buffer_descriptor
    assert (where.size, where.transport_endpoint) == (5, OTHER)
    with pytest.raises(RuntimeError):
        found.get_disk_descriptor()
    described = store.batch_get_replica_desc(["k", "both", "missing"])
    assert {k: len(v) for k, v in described.items()} == {"k": 1, "both": 2}
    assert store.get_replica_desc("missing") == []


def test_more_replicas_than_segments_are_as_many_as_there_are() -> None:
    cluster = FakeCluster(HOME)
    assert store_on(cluster).put("k", b"v", ReplicateConfig(replica_num=3)) == 0
    assert cluster.seen[-1].replicas == 3
    assert not cluster.seen[-1].strict_replicas


def test_replicas_are_cleared_on_one_segment_or_on_all() -> None:
    cluster = FakeCluster(HOME, OTHER)
    store = store_on(cluster)
    store.put("k", b"v", ReplicateConfig(replica_num=2))
    assert store.batch_replica_clear(["k", "missing", ""], segment_name=OTHER) == ["k"]
    assert cluster.holders("k") == [HOME]
    assert store.batch_replica_clear(["k"]) == ["k"]
    assert store.batch_replica_clear(["k"]) == []


def test_copy_and_move_tasks() -> None:
    cluster = FakeCluster(HOME, OTHER)
    store = store_on(cluster)
    store.put("k", b"v")
    task, code = store.create_copy_task("k", [OTHER])
    assert code == 0
    assert len(task) == 2
    response, code = store.query_task(task)
    assert (code, response and response.status, response and response.type) == (
        0,
        TaskStatus.SUCCESS,
        TaskType.REPLICA_COPY,
    )
    assert cluster.holders("k") == [HOME, OTHER]
    task, code = store.create_move_task("k", HOME, OTHER)
    assert (code, cluster.holders("k")) == (0, [OTHER])


def test_refusals_of_tasks() -> None:
    store = store_on(FakeCluster(HOME, OTHER))
    store.put("k", b"v")
    assert store.create_copy_task("missing", [OTHER])[1] == -704
    assert store.create_copy_task("k", ["nowhere"])[1] == -600
    assert store.create_move_task("k", "nowhere", OTHER)[1] == -600
    assert store.create_move_task("k", HOME, "nowhere")[1] == -600
    assert store.create_move_task("k", HOME, HOME)[1] == -600
    assert store.query_task((1, 2)) == (None, -1400)


@pytest.mark.parametrize(
    "config",
    [
        ReplicateConfig(replica_num=0),
        ReplicateConfig(soft_pin_ttl_ms=1000),
        ReplicateConfig(nof_replica_num=1),
        ReplicateConfig(dfs_replica_num=1),
        ReplicateConfig(group_ids=["a", "b"]),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(config: ReplicateConfig) -> None:
    store = store_on(FakeCluster(HOME))
    assert (store.put("k", b"v", config), store.is_exist("k")) == (-600, 0)


def test_groups_stay_with_their_keys_when_others_are_refused() -> None:
    cluster = FakeCluster(HOME)
    config = ReplicateConfig(group_ids=["a", "b", "c"])
    assert store_on(cluster).put_batch(["x", "", "z"], [b"1"] * 3, config) == -600
    assert cluster.seen[-1].groups == ("a", "c")
