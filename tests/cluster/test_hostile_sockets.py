"""Hostile bytes at the sockets of real processes: they stay small, and go on serving."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.testing.cluster import LocalCluster
from moonpool.testing.leaks import no_leaks
from moonpool.wire.address import UnixAddress
from moonpool.wire.dial import connect
from tests import hostile

pytestmark = pytest.mark.cluster


class Target:
    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.nodes = [cluster.master, *cluster.messengers]
        self.before = [self._resident(node.pid) for node in self.nodes]

    @staticmethod
    def _resident(pid: int) -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def growth(self) -> int:
        return max(self._resident(n.pid) - before for n, before in zip(self.nodes, self.before, strict=True))


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with no_leaks(), LocalCluster(messengers=1, capacity=16 << 20) as cluster:
        target = Target(cluster)
        yield target
        assert target.growth() < 32 * hostile.MIB
        pool = cluster.client()
        pool.put("key", b"value")
        assert pool.get("key") == b"value"
        assert not any("Traceback" in cluster.log(node.name) for node in target.nodes)


@settings(max_examples=150, deadline=None)
@given(data=hostile.streams, which=st.integers(0, 1), guest=st.booleans())
def test_nonsense(target: Target, data: bytes, which: int, guest: bool) -> None:
    path = target.nodes[which].socket
    if guest:
        with connect(path, timeout=10) as sock:
            hostile.converse(sock, data)
    else:
        hostile.send_and_hear(UnixAddress(path), data)
