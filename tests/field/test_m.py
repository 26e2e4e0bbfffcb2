"""M: performance cliffs. Ratios within one run, or counts of waits; never a machine's speed."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable

import pytest

from moonpool.store.embedded import EmbeddedPool
from moonpool.store.messenger.records import Limits, Reserved, Row
from moonpool.store.messenger.state import MessengerState
from moonpool.testing.cluster import LocalCluster
from moonpool.testing.fake_clock import FakeClock
from moonpool.testing.leaks import no_leaks
from moonpool.types import Put, PutOptions
from moonpool.wire import messages as m
from moonpool.wire.rpc import SocketChannel
from tests.field.support import SESSION, put

MIB = 1 << 20


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def filled(count: int) -> MessengerState:
    """A full state of `count` objects of one unit of space."""
    limits = Limits(high_watermark=1.0, eviction_ratio=0.0, changes_kept=0, max_objects=count)
    state = MessengerState(64 * count, FakeClock(), limits)
    for start in range(0, count, 1000):
        got = state.reserve_all(SESSION, [(f"k{i}", 1) for i in range(start, start + 1000)])
        ids = range(got.id, got.id + 1000) if isinstance(got, Row) else [r.id for r in got if isinstance(r, Reserved)]
        state.commit(SESSION, list(ids))
    assert state.stats().objects == count
    return state


def test_evicting_and_reading_take_as_long_among_many_objects_as_among_few() -> None:
    """M1"""
    small, large = filled(1_000), filled(200_000)
    fresh = itertools.count()

    def evict(state: MessengerState) -> float:
        return statistics.median(seconds(lambda: put(state, f"n{next(fresh)}", 1)) for _ in range(300))

    def read(state: MessengerState) -> float:
        def once() -> None:
            lease, _ = state.open_read(SESSION, ["k900"])
            state.close_read(SESSION, [lease])

        return statistics.median(seconds(once) for _ in range(300))

    evict(small)
    assert evict(large) < 10 * evict(small)
    assert read(large) < 10 * read(small)


@pytest.mark.cluster
def test_large_probes_do_not_keep_puts_waiting() -> None:
    """M2: while a batch_is_exist of 50 000 keys is asked again and again, a put waits for one of them, not for many."""
    with no_leaks(), LocalCluster(messengers=1, capacity=16 * MIB) as cluster:
        writer, prober = cluster.client(), cluster.client()
        probed = [f"k{i}" for i in range(50_000)]
        one = statistics.median(seconds(lambda: prober.batch_is_exist(probed)) for _ in range(3))
        stop = threading.Event()
        rounds: list[float] = []

        def probe() -> None:
            while not stop.is_set():
                rounds.append(seconds(lambda: prober.batch_is_exist(probed)))

        thread = threading.Thread(target=probe)
        thread.start()
        times = sorted(seconds(lambda i=i: writer.put(f"w{i}", b"x")) for i in range(300))  # type: ignore[misc]
        stop.set()
        thread.join()
        assert rounds
        assert times[int(0.99 * len(times))] < max(one, *rounds)


def test_removing_is_linear() -> None:
    """M3: one at a time, in batches, and by `remove_all`"""

    def remove(count: int, chunk: int) -> float:
        state = filled(count)
        keys = [f"k{i}" for i in range(count)]
        pieces = [keys[i : i + chunk] for i in range(0, count, chunk)]
        return seconds(lambda: [state.remove(p) for p in pieces])

    for chunk in (1, 1000):
        few, many = (min(remove(count, chunk) for _ in range(3)) for count in (10_000, 100_000))
        assert many <= 20 * few, "quadratic would be 100"


def test_a_batch_of_one_group_is_touched_once() -> None:
    """M3: put and read as a batch, the members of a group cost about what single objects cost"""

    def put_and_read(group: str) -> float:
        with EmbeddedPool(MIB) as pool:
            keys = [f"k{i}" for i in range(2000)]
            options = PutOptions(groups=(group,) * len(keys))
            return seconds(lambda: (pool.batch_put(keys, [b"x"] * len(keys), options), pool.batch_get(keys)))

    put_and_read("")
    assert put_and_read("g") < 10 * put_and_read("")


@pytest.mark.cluster
def test_small_calls_over_tcp_wait_for_no_timer() -> None:
    """M4: with Nagle and delayed acknowledgements each would wait 40 ms"""
    with no_leaks(), LocalCluster(messengers=1, capacity=4 * MIB, listen=True) as cluster:
        near = SocketChannel(cluster.messengers[0].socket, 10.0)
        far = SocketChannel(cluster.infos()[0].listen, 10.0)
        try:
            for channel in (near, far):
                channel.call(m.Hello(), m.Welcome)
            calls = {
                channel: sum(seconds(lambda c=channel: c.call(m.Exist(["k" * 90]), m.Flags)) for _ in range(1000))  # type: ignore[misc]
                for channel in (near, far)
            }
        finally:
            near.close()
            far.close()
        assert calls[far] < max(10 * calls[near], 2.0)


@pytest.mark.cluster
def test_a_dead_replica_is_paid_for_once() -> None:
    """M6: the first request waits for the frozen messenger, the next hundred do not; a good put is read at once."""
    with no_leaks(), LocalCluster(messengers=2, capacity=8 * MIB, expiry_s=60.0) as cluster:
        pool = cluster.client(0)
        cluster.client(1).put("stale", b"1")
        assert pool.get("stale") == b"1"
        cluster.messengers[1].freeze()
        first = seconds(lambda: pool.batch_get(["stale"]))
        rest = sum(seconds(lambda: pool.batch_get(["stale"])) for _ in range(100))
        assert rest < max(0.5, first), "a hundred requests cost less than one time-out"
        assert pool.put("fresh", b"2") is Put.STORED
        assert pool.get("fresh") == b"2"
        cluster.messengers[1].thaw()
