"""What is open to read keeps its bytes, whatever becomes of the connection that it was opened over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moonpool.store.base import ReadLease
from moonpool.store.client import PoolClient
from moonpool.testing.cluster import LocalCluster
from moonpool.testing.leaks import eventually, no_leaks

pytestmark = pytest.mark.cluster
MIB = 1 << 20


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with no_leaks(), LocalCluster(messengers=2, capacity=4 * MIB) as running:
        yield running


def overwrite(pool: PoolClient) -> None:
    """Put so much that everything which may go has gone, from the first byte of the segment to its last."""
    for i in range(64):
        pool.batch_put([f"x{i}"], [b"\xff" * (MIB // 4)])


def closes(lease: ReadLease, pool: PoolClient) -> bool:
    lease.close()
    return eventually(lambda: pool.stats().reads_open == 0)


def test_when_the_master_does_not_list_its_messenger_any_more(cluster: LocalCluster) -> None:
    near = cluster.client(1)
    near.put("k", b"k" * MIB)
    far = cluster.client(0)
    lease = far.open_read(["k"])
    cluster.messengers[1].freeze()
    cluster.master.restart()
    assert eventually(lambda: [i.name for i in far.messengers()] == ["m0"])
    cluster.messengers[1].thaw()
    assert eventually(lambda: cluster.listed() == ["m0", "m1"])
    overwrite(near)
    assert bytes(lease.views[0] or b"") == b"k" * MIB
    assert closes(lease, near)


def test_when_a_call_over_the_same_connection_takes_too_long(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.store.client._HOME_TIMEOUT_S", 0.3)
    pool, other = cluster.client(1), cluster.client(1)
    pool.put("k", b"k" * MIB)
    lease = pool.open_read(["k"])
    cluster.messengers[1].freeze()
    assert pool.batch_get(["k"]) == [None]
    cluster.messengers[1].thaw()
    assert eventually(lambda: cluster.listed() == ["m0", "m1"])
    overwrite(other)
    assert bytes(lease.views[0] or b"") == b"k" * MIB
    assert closes(lease, other)
