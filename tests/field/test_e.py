"""E: deadlocks and hangs."""

from __future__ import annotations

import threading
import time

import pytest

from moonpool.errors import MoonpoolError, NoSpace
from moonpool.store.embedded import EmbeddedPool
from moonpool.store.messenger.allocator import Allocator
from moonpool.testing.cluster import LocalCluster
from moonpool.testing.leaks import no_leaks
from moonpool.types import Put, PutOptions

MIB = 1 << 20


class Failing(Allocator):
    """Fails at its n-th allocation, once."""

    def __init__(self, capacity: int, at: int, error: Exception) -> None:
        super().__init__(capacity)
        self._at, self._error = at, error

    def allocate(self, size: int) -> int | None:
        self._at -= 1
        if self._at == 0:
            raise self._error
        return super().allocate(size)


@pytest.mark.parametrize("error", [NoSpace("injected"), MemoryError("injected")], ids=["refused", "a bug"])
@pytest.mark.parametrize("at", range(1, 7))
def test_no_failure_inside_a_put_keeps_the_lock(at: int, error: Exception) -> None:
    """E2: at each allocation of single puts, a batch in one piece, and a replacement; then another thread goes on."""
    with no_leaks(), EmbeddedPool(MIB) as pool:
        pool.service._state._space = Failing(MIB, at, error)
        for action in (
            lambda: pool.batch_put(["a"], [b"1"]),
            lambda: pool.batch_put(["b", "c"], [b"1", b"2"]),
            lambda: pool.batch_put(["a"], [b"3"], PutOptions(replace=True)),
            lambda: pool.batch_put(["d", "d"], [b"1", b"2"]),
            lambda: pool.batch_put([f"e{i}" for i in range(3)], [b"1"] * 3, PutOptions(groups=("g", "", "g"))),
        ):
            try:
                action()
            except (MoonpoolError, MemoryError):
                pass  # what fails is not the point
        done: list[object] = []

        def work() -> None:
            done.append(pool.put("after", b"x"))
            done.append(pool.get("after"))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(5)
        assert done == [Put.STORED, b"x"]
        assert pool.stats().writes_open == 0
        pool.service.check_integrity()


@pytest.mark.cluster
def test_a_frozen_messenger_and_a_frozen_client_delay_nobody_elses_probe() -> None:
    """E7"""
    with no_leaks(), LocalCluster(messengers=2, capacity=8 * MIB, expiry_s=60.0) as cluster:
        pool, stuck = cluster.client(0), cluster.client(1)
        pool.put("k", b"1")
        lease = stuck.open_read(["k"])
        cluster.messengers[1].freeze()
        slowest = 0.0
        for _ in range(200):
            start = time.monotonic()
            assert pool.batch_is_exist(["k", "nowhere"]) == [True, False]
            slowest = max(slowest, time.monotonic() - start)
        assert slowest < 1.0, "a probe waits for nobody: each wait of ours is at least two seconds"
        cluster.messengers[1].thaw()
        lease.close()
