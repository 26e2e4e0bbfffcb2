"""D: restart and failover."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moonpool.testing.cluster import LocalCluster
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.types import Put

pytestmark = pytest.mark.cluster
MIB = 1 << 20


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with no_leaks(), LocalCluster(messengers=2, capacity=8 * MIB) as running:
        yield running


def test_a_messenger_that_comes_back_under_its_name_counts_once_and_has_nothing(cluster: LocalCluster) -> None:
    """D3, before anybody has missed it"""
    pool = cluster.client(0)
    cluster.client(1).put("old", b"o" * 1000)
    for _ in range(3):
        cluster.messengers[1].restart()
    assert eventually(lambda: cluster.listed() == ["m0", "m1"])
    assert pool.batch_get(["old"]) == [None]
    assert eventually(lambda: cluster.located("old") == [])
    assert eventually(lambda: sum(i.capacity for i in pool.messengers()) == 16 * MIB)
    assert pool.stats().capacity == 16 * MIB


def test_a_frozen_messenger_that_was_given_up_gives_no_place_out_twice(cluster: LocalCluster) -> None:
    """D3, a partition that heals while it is being forgotten"""
    pool, other = cluster.client(0), cluster.client(1)
    keys = [f"k{i}" for i in range(16)]
    assert other.batch_put(keys, [k.encode() * 1000 for k in keys]) == [Put.STORED] * 16
    cluster.messengers[1].freeze()
    assert eventually(lambda: cluster.listed() == ["m0"])
    cluster.messengers[1].thaw()
    assert eventually(lambda: cluster.listed() == ["m0", "m1"])
    assert eventually(lambda: None not in pool.batch_get(keys))
    assert pool.batch_get(keys) == [k.encode() * 1000 for k in keys]
    assert eventually(lambda: all(cluster.located(k) == ["m1"] for k in keys))


def test_a_dead_messenger_costs_each_writer_at_most_one_put(cluster: LocalCluster) -> None:
    """D5"""
    pool = cluster.client(0)
    fill = 0
    while pool.messengers()[0].used < 7.5 * MIB:  # so full that the other one is the likelier target
        pool.put(f"fill-{fill}", bytes(MIB // 4))
        fill += 1
        assert eventually(lambda: pool.messengers()[0].used > 0)
    cluster.messengers[1].kill()
    outcomes = [pool.batch_put([f"k{i}"], [b"v" * 1000])[0] for i in range(100)]
    assert sum(o is not Put.STORED for o in outcomes) <= 1, "what one messenger does not take goes to another"
