"""Real processes, real signals: what dies takes nothing with it but its own."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from moonpool.errors import ConnectionLost, DeadlineExceeded, KeyBusy, LeaseExpired, MoonpoolError, NativeExists
from moonpool.keys import PageKey
from moonpool.store.base import EventStream, KVPool, Reservation
from moonpool.store.client import PoolClient
from moonpool.testing.cluster import LocalCluster
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.types import Hinted, Missed, PoolEvent, Put, Removed, Stored

pytestmark = pytest.mark.cluster
MIB = 1 << 20
OWNER = "a" * 32
spawn = multiprocessing.get_context("spawn")
resource_tracker.ensure_running()  # it stays for the life of the process, so it must be there before leaks are counted


def page(index: int) -> PageKey:
    return PageKey(OWNER, index, f"{index:032x}")


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with no_leaks(), LocalCluster(messengers=1, capacity=8 * MIB) as cluster:
        yield cluster


@pytest.fixture
def pair() -> Iterator[LocalCluster]:
    with no_leaks(), LocalCluster(messengers=2, capacity=8 * MIB) as cluster:
        yield cluster


def is_home(pool: KVPool) -> Callable[[], bool]:
    """Whether a put succeeds again."""
    keys = iter(range(1 << 20))
    return lambda: pool.batch_put([f"probe-{next(keys)}"], [b"x"]) == [Put.STORED]


def has_ended(stream: EventStream) -> bool:
    try:
        stream.next(1, 0.0)
    except ConnectionLost:
        return True
    return False


# -- other processes as clients


def _write_and_wait(master: str, home: str, ready: Connection) -> None:
    """A client that reserves, writes half, opens a read, and hangs."""
    pool = PoolClient.connect(master, messenger=home)
    [r] = pool.reserve([("half", 4 * MIB)])
    assert isinstance(r, Reservation)
    r.view[: 2 * MIB] = b"\x01" * (2 * MIB)
    lease = pool.open_read(["read"])
    assert bytes(lease.views[0] or b"") == b"r" * 1000
    ready.send("ready")
    time.sleep(60)


def _read_one(master: str, home: str, key: str, out: Connection) -> None:
    with PoolClient.connect(master, messenger=home) as pool, pool.open_read([key]) as lease:
        view = lease.views[0]
        maps = Path("/proc/self/maps").read_text().count("memfd:moonpool")
        out.send((None if view is None else bytes(view), view is not None and view.readonly, maps))


def test_two_processes_share_bytes_without_a_copy(cluster: LocalCluster) -> None:
    data = os.urandom(300_000)
    assert cluster.client().put("shared", data) is Put.STORED
    here, there = spawn.Pipe()
    child = spawn.Process(target=_read_one, args=(cluster.master.socket, cluster.messengers[0].socket, "shared", there))
    child.start()
    there.close()
    got, readonly, maps = here.recv()
    child.join(10)
    here.close()
    child.close()
    assert got == data
    assert readonly
    assert maps == 1, "the reader maps the segment itself"


def test_a_client_killed_mid_put_leaves_nothing(cluster: LocalCluster) -> None:
    pool = cluster.client()
    pool.put("read", b"r" * 1000)
    before = pool.stats()
    here, there = spawn.Pipe()
    child = spawn.Process(target=_write_and_wait, args=(cluster.master.socket, cluster.messengers[0].socket, there))
    child.start()
    there.close()
    assert here.recv() == "ready"
    during = pool.stats()
    assert (during.writes_open, during.reads_open) == (1, 1)
    assert during.used == before.used + 4 * MIB
    assert child.pid
    os.kill(child.pid, signal.SIGKILL)
    child.join(10)
    child.close()
    here.close()
    assert eventually(lambda: pool.stats().writes_open == 0)
    after = pool.stats()
    assert (after.reads_open, after.used, after.revoked) == (0, before.used, before.revoked + 1)
    assert not pool.is_exist("half")
    assert pool.put("half", bytes(7 * MIB)) is Put.STORED


# -- the messenger


def test_a_killed_messenger_means_misses_and_typed_errors_then_a_fresh_start(cluster: LocalCluster) -> None:
    pool = cluster.client()
    pool.put("old", b"o" * 5000)
    lease = pool.open_read(["old"])
    [r] = pool.reserve([("unfinished", 100)])
    assert isinstance(r, Reservation)
    view = lease.views[0]
    cluster.messengers[0].kill()
    assert pool.batch_get(["old"]) == [None]
    assert pool.batch_is_exist(["old"]) == [False]
    assert pool.lookup([page(0)], ["b" * 32]) == [None]
    [failed] = pool.batch_put(["new"], [b"n"])
    assert isinstance(failed, ConnectionLost)
    assert bytes(view or b"") == b"o" * 5000, "what was mapped stays readable: no SIGBUS"
    cluster.messengers[0].start()
    assert eventually(is_home(pool))
    assert pool.batch_get(["old"]) == [None], "a restarted messenger holds nothing"
    [late] = pool.commit([r])
    assert isinstance(late, ConnectionLost | LeaseExpired), "a reservation of the former life means nothing now"
    assert not pool.is_exist("unfinished")
    lease.close()
    pool.put("old", b"different")
    assert pool.get("old") == b"different"
    stats = pool.stats()
    assert (stats.reads_open, stats.writes_open) == (0, 0)


def test_an_old_lease_does_not_close_a_new_one(cluster: LocalCluster) -> None:
    """Lease numbers start anew in a restarted messenger; sessions keep them apart."""
    pool = cluster.client()
    pool.put("a", b"1")
    old = pool.open_read(["a"])
    cluster.messengers[0].restart()
    assert eventually(is_home(pool))
    pool.put("a", b"2")
    new = pool.open_read(["a"])
    old.close()
    assert pool.stats().reads_open == 1
    new.close()


def test_sigterm_ends_a_messenger_in_order(cluster: LocalCluster) -> None:
    pool = cluster.client()
    stream = pool.subscribe([OWNER])
    held = pool.open_read([])
    assert cluster.messengers[0].stop() == 0
    assert pool.batch_get(["x"]) == [None]
    assert eventually(lambda: has_ended(stream))
    held.close()
    assert cluster.master.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_however_it_ends_nothing_is_left(number: signal.Signals) -> None:
    """No process, no descriptor, no file in /dev/shm; and the next one at the same path starts."""
    with no_leaks(), LocalCluster(capacity=8 * MIB) as cluster:
        for _ in range(2):
            pool = cluster.client()
            assert pool.put("k", bytes(MIB)) is Put.STORED
            assert cluster.messengers[0].end(number) == (-number if number == signal.SIGKILL else 0)
            pool.close()
            cluster.messengers[0].start()


def test_many_threads_survive_a_restart(cluster: LocalCluster) -> None:
    pool = cluster.client()
    stop = threading.Event()
    wrong: list[object] = []

    def work(n: int) -> None:
        i = 0
        while not stop.is_set():
            key, value = f"{n}-{i}", f"{n}-{i}".encode() * 100
            try:
                stored = pool.batch_put([key], [value])[0]
                got = pool.batch_get([key])[0]
            except Exception as e:  # noqa: BLE001 - whatever comes is a finding
                wrong.append(e)
                return
            if got not in (None, value):
                wrong.append((key, stored, got))
            i += 1

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    cluster.messengers[0].restart()
    assert eventually(is_home(pool))
    stop.set()
    for t in threads:
        t.join(20)
    assert wrong == []
    assert pool.stats().writes_open == 0


def test_a_frozen_messenger_costs_one_deadline(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.store.client._HOME_TIMEOUT_S", 0.3)
    pool = cluster.client()
    cluster.messengers[0].freeze()
    start = time.monotonic()
    outcomes = [pool.batch_put([f"k{i}"], [b"x"])[0] for i in range(100)]
    assert all(isinstance(o, ConnectionLost | DeadlineExceeded) for o in outcomes)
    assert time.monotonic() - start < 2
    cluster.messengers[0].thaw()
    assert eventually(is_home(pool))
    assert eventually(lambda: pool.stats().writes_open == 0), "what was reserved while frozen went with its session"


# -- the master


def test_local_work_goes_on_without_a_master_and_the_index_comes_back(pair: LocalCluster) -> None:
    a, b = pair.client(0), pair.client(1)
    a.put("before", b"1")
    assert eventually(lambda: pair.located("before") == ["m0"])
    assert b.get("before") == b"1"
    pair.master.kill()
    assert a.put("during", b"2") is Put.STORED
    assert a.get("before") == b"1"
    assert a.get("during") == b"2"
    assert a.batch_get(["nowhere"]) == [None]
    a.remove("before")
    late = pair.client(0)
    assert late.get("during") == b"2", "joining needs no master either, where the messenger is known"
    pair.master.start()
    assert eventually(lambda: pair.located("during") == ["m0"])
    assert pair.located("before") == []
    assert eventually(lambda: b.batch_get(["during"]) == [b"2"])


def test_a_frozen_master_is_paid_for_once(pair: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.store.client._MASTER_TIMEOUT_S", 0.3)
    pool = pair.client(0)
    pool.put("here", b"1")
    pool.batch_get(["nowhere"])
    pair.master.freeze()
    start = time.monotonic()
    for _ in range(100):
        assert pool.batch_get(["here", "nowhere"]) == [b"1", None]
    assert time.monotonic() - start < 2
    pair.master.thaw()


def test_a_frozen_master_does_not_keep_a_messenger_from_ending(pair: LocalCluster) -> None:
    pair.master.freeze()
    start = time.monotonic()
    assert pair.messengers[0].stop() == 0
    assert time.monotonic() - start < 4
    pair.master.thaw()


def test_reads_find_other_messengers_and_dead_ones_are_forgotten(pair: LocalCluster) -> None:
    a, b = pair.client(0), pair.client(1)
    a.batch_put(["a1", "a2"], [b"1", b"22"])
    b.put("b1", b"333")
    key, converted = page(7), page(8).converted("c" * 32)
    a.put(key.text, b"native")
    a.put(converted.text, b"approximate")
    assert eventually(lambda: b.batch_get(["a1", "b1", "nowhere", "a2"]) == [b"1", b"333", None, b"22"])
    assert eventually(lambda: b.lookup([key])[0] is not None)
    assert b.lookup([key, page(8), page(9)], ["c" * 32]) == [
        (key.text, False),
        (converted.text, True),
        None,
    ]
    with pytest.raises(NativeExists):
        b.put(page(7).converted("c" * 32).text, b"worse than the other messenger's native page")
    assert b.lookup([key], ["c" * 32]) == [(key.text, False)]
    assert b.batch_is_exist(["a1", "b1", "c1"]) == [True, True, False]
    assert b.batch_remove(["a1"]) == [Removed.REMOVED]
    assert not a.is_exist("a1")
    assert not b.is_exist("a1")
    pair.messengers[0].kill()
    assert b.batch_get(["a2", "b1"]) == [None, b"333"]
    assert eventually(lambda: pair.listed() == ["m1"])
    assert eventually(lambda: b.batch_is_exist(["a2"]) == [False])


def test_a_messenger_that_was_taken_for_dead_comes_back_with_all_it_holds(pair: LocalCluster) -> None:
    a, b = pair.client(0), pair.client(1)
    a.put("k", b"v")
    assert eventually(lambda: pair.located("k") == ["m0"])
    pair.messengers[0].freeze()
    assert eventually(lambda: pair.listed() == ["m1"])
    assert pair.located("k") == []
    pair.messengers[0].thaw()
    assert eventually(lambda: pair.located("k") == ["m0"])
    assert eventually(lambda: b.batch_get(["k"]) == [b"v"])


# -- events


def collect(stream: EventStream, wanted: int) -> list[PoolEvent]:
    got: list[PoolEvent] = []

    def enough() -> bool:
        got.extend(stream.next(100, 0.1))
        return len(got) >= wanted

    assert eventually(enough)
    return got


def test_events_of_all_messengers(pair: LocalCluster) -> None:
    a, b = pair.client(0), pair.client(1)
    listener = pair.client(0)
    stream = listener.subscribe([OWNER])
    a.put(page(1).text, b"1")
    b.put(page(2).text, b"22")
    b.put(page(6).converted("c" * 32).text, b"no event")
    a.lookup([page(3)], ["c" * 32])
    b.hint([page(4)])
    got = collect(stream, 4)
    assert sorted(got, key=str) == sorted(
        [Stored(page(1).text, 1), Stored(page(2).text, 2), Missed(page(3).text), Hinted(page(4).text)], key=str
    )
    pair.messengers[1].restart()
    assert eventually(is_home(b))

    def heard() -> bool:
        b.hint([page(5)])
        return Hinted(page(5).text) in stream.next(10, 0.1)

    assert eventually(heard)
    stream.close()


def test_closing_the_pool_wakes_a_listener(cluster: LocalCluster) -> None:
    pool = cluster.client()
    stream = pool.subscribe([OWNER])
    errors: list[MoonpoolError] = []

    def listen() -> None:
        try:
            while True:
                stream.next(10, 30.0)
        except MoonpoolError as e:
            errors.append(e)

    thread = threading.Thread(target=listen)
    thread.start()
    pool.close()
    thread.join(5)
    assert not thread.is_alive()
    assert len(errors) == 1


# -- load


def _stress(master: str, home: str, seed: int, out: Connection) -> None:
    """Put and read objects whose bytes follow from their key, in a pool that is far too small; report what was wrong."""
    rng, hits = random.Random(seed), 0
    wrong: list[str] = []
    with PoolClient.connect(master, messenger=home) as pool:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            keys = [f"s{n}" for n in rng.sample(range(400), 8)]
            values = [k.encode() * (1000 + int(k[1:]) * 50) for k in keys]
            refused = [o for o in pool.batch_put(keys, values) if isinstance(o, MoonpoolError)]
            wrong += [repr(o) for o in refused if not isinstance(o, KeyBusy)]
            with pool.open_read(keys) as lease:
                for key, value, view in zip(keys, values, lease.views, strict=True):
                    hits += view is not None
                    if view is not None and bytes(view) != value:
                        wrong.append(key)
    out.send((wrong, hits))


def test_no_wrong_byte_under_eviction_by_many_processes(cluster: LocalCluster) -> None:
    pipes = [spawn.Pipe(duplex=False) for _ in range(3)]
    home = cluster.messengers[0].socket
    children = [
        spawn.Process(target=_stress, args=(cluster.master.socket, home, i, out)) for i, (_, out) in enumerate(pipes)
    ]
    for child in children:
        child.start()
    for inn, out in pipes:
        out.close()
        wrong, hits = inn.recv()
        inn.close()
        assert wrong == []
        assert hits > 100
    for child in children:
        child.join(10)
        child.close()
    pool = cluster.client()
    assert eventually(lambda: pool.stats().reads_open + pool.stats().writes_open == 0)
    assert pool.stats().evictions > 100


def test_a_messenger_out_of_descriptors_serves_on(cluster: LocalCluster) -> None:
    pool = cluster.client()
    pool.put("k", b"v")
    pid = cluster.messengers[0].pid
    held = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (held + 2, most))
    raw = []
    for _ in range(6):
        raw.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        raw[-1].connect(cluster.messengers[0].socket)
    assert eventually(lambda: "cannot accept" in cluster.log("m0"))
    assert pool.get("k") == b"v"
    for sock in raw:
        sock.close()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
    assert cluster.client().get("k") == b"v"
