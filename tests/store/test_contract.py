"""What every `KVPool` must do, whatever carries it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from itertools import count

import pytest

from moonpool.errors import (
    FrameTooLarge,
    KeyBusy,
    LeaseExpired,
    MoonpoolError,
    NativeExists,
    NoSpace,
    NotFound,
    ObjectTooLarge,
    PoolClosed,
    PoolError,
    WrongSize,
)
from moonpool.keys import PageKey
from moonpool.store.base import KVPool, Match, Reservation
from moonpool.types import Hinted, Missed, Put, PutOutcome, Removed, Stored

_names = count()
Fresh = Callable[[int], KVPool]
BUNDLE, OTHER = "b" * 32, "c" * 32


def name() -> str:
    return f"object-{next(_names)}"


def page(owner: str = "a" * 32) -> PageKey:
    return PageKey(owner, next(_names), f"{next(_names):032x}")


def reserved(pool: KVPool, key: str, size: int) -> Reservation:
    [got] = pool.reserve([(key, size)])
    assert isinstance(got, Reservation), got
    return got


def test_put_then_get_gives_the_same_bytes(pool: KVPool) -> None:
    key = name()
    assert pool.put(key, b"hello") is Put.STORED
    assert pool.get(key) == b"hello"
    assert pool.is_exist(key)


def test_objects_are_immutable(pool: KVPool) -> None:
    key = name()
    pool.put(key, b"first")
    assert pool.put(key, b"second") is Put.EXISTED
    assert pool.get(key) == b"first"


@pytest.mark.needs("empty_objects")
def test_a_missing_key_is_not_an_empty_one(pool: KVPool) -> None:
    empty, missing = name(), name()
    pool.put(empty, b"")
    assert pool.batch_get([empty, missing]) == [b"", None]
    assert pool.batch_is_exist([empty, missing]) == [True, False]
    with pytest.raises(NotFound):
        pool.get(missing)


def test_batch_results_stand_in_the_order_of_the_keys(pool: KVPool) -> None:
    a, b, c = name(), name(), name()
    pool.batch_put([a, c], [b"a", b"ccc"])
    assert pool.batch_get([c, b, a, a]) == [b"ccc", None, b"a", b"a"]
    assert pool.batch_get([]) == []
    assert pool.batch_put([], []) == []


def test_one_key_twice_in_a_batch_is_stored_once(pool: KVPool) -> None:
    a, b = name(), name()
    assert pool.batch_put([a, b, a], [b"1", b"2", b"3"]) == [Put.STORED, Put.STORED, Put.EXISTED]
    assert pool.batch_get([a, b]) == [b"1", b"2"]


def test_a_failing_key_does_not_fail_its_batch(pool: KVPool) -> None:
    a, big, b = name(), name(), name()
    first, refused, last = pool.batch_put([a, big, b], [b"a", bytes(17 << 20), b"b"])
    assert (first, last) == (Put.STORED, Put.STORED)
    assert isinstance(refused, ObjectTooLarge)
    assert pool.batch_get([a, big, b]) == [b"a", None, b"b"]


def test_nothing_is_visible_before_commit(pool: KVPool) -> None:
    key = name()
    r = reserved(pool, key, 4)
    r.view[:] = b"abcd"
    assert not pool.is_exist(key)
    assert pool.batch_get([key]) == [None]
    assert pool.commit([r]) == [Put.STORED]
    assert pool.get(key) == b"abcd"


@pytest.mark.needs("reserve_pool_space")
def test_revoke_gives_the_space_back(pool: KVPool) -> None:
    key, before = name(), pool.stats().used
    r = reserved(pool, key, 1 << 20)
    assert pool.stats().used == before + (1 << 20)
    pool.revoke([r])
    assert pool.stats().used == before
    assert not pool.is_exist(key)
    [late] = pool.commit([r])
    assert isinstance(late, LeaseExpired)
    assert pool.put(key, b"again") is Put.STORED


def test_revoked_and_committed_views_cannot_be_written(pool: KVPool) -> None:
    done, undone = reserved(pool, name(), 8), reserved(pool, name(), 8)
    pool.commit([done])
    pool.revoke([undone])
    for r in (done, undone):
        with pytest.raises(ValueError):
            r.view[0] = 1


def test_commit_is_not_disturbed_by_an_array_over_the_view(pool: KVPool) -> None:
    numpy = pytest.importorskip("numpy")
    r = reserved(pool, name(), 8)
    array = numpy.frombuffer(r.view, dtype=numpy.uint8)
    array[:] = 7
    assert pool.commit([r]) == [Put.STORED]
    assert pool.get(r.key) == b"\x07" * 8


def test_a_second_writer_is_told(pool: KVPool) -> None:
    key = name()
    r = reserved(pool, key, 4)
    [other] = pool.reserve([(key, 4)])
    assert isinstance(other, KeyBusy)
    pool.revoke([r])


def test_revoking_twice_is_harmless_and_revokes_the_rest(pool: KVPool) -> None:
    a, b = reserved(pool, name(), 4), reserved(pool, name(), 4)
    pool.revoke([a])
    pool.revoke([a, b])
    assert pool.stats().writes_open == 0


@pytest.mark.needs("remove_what_was_read")
def test_views_are_read_only_and_stay_valid_when_the_object_is_removed(pool: KVPool) -> None:
    key, data = name(), bytes(range(256)) * 16
    pool.put(key, data)
    with pool.open_read([key, "nowhere"]) as lease:
        view = lease.views[0]
        assert view is not None
        assert lease.views[1] is None
        assert view.readonly
        assert pool.remove(key)
        used = pool.stats().used
        pool.put(name(), bytes(len(data)))
        assert pool.stats().used == used + len(data)
        assert view == data
    assert pool.stats().used == used
    lease.close()


@pytest.mark.needs("evict_on_demand")
def test_an_open_read_outlives_pressure(fresh_small: KVPool) -> None:
    pool = fresh_small
    pool.put("kept", b"k" * 4096)
    with pool.open_read(["kept"]) as lease:
        for i in range(64):
            pool.put(f"filler-{i}", bytes(4096))
        assert bytes(lease.views[0] or b"") == b"k" * 4096
        assert pool.is_exist("kept")
    assert pool.stats().evictions > 0


@pytest.fixture
def fresh_small(fresh: Fresh) -> KVPool:
    return fresh(64 << 10)


@pytest.mark.needs("exact_lru")
def test_a_full_pool_evicts_the_least_recently_used(fresh_small: KVPool) -> None:
    pool = fresh_small
    for i in range(15):
        pool.put(f"k{i}", bytes([i]) * 4096)
    pool.get("k0")
    pool.put("new", bytes(4096))
    assert pool.is_exist("k0")
    assert not pool.is_exist("k1")
    assert pool.get("new") == bytes(4096)


@pytest.mark.needs("probe_without_touch")
def test_probing_does_not_touch(fresh_small: KVPool) -> None:
    pool = fresh_small
    for i in range(15):
        pool.put(f"k{i}", bytes(4096))
    pool.is_exist("k0")
    pool.put("new", bytes(4096))
    assert not pool.is_exist("k0")


@pytest.mark.needs("exact_lru")
def test_the_end_of_a_prefix_goes_before_its_start(fresh_small: KVPool) -> None:
    pool = fresh_small
    keys = [f"page-{i}" for i in range(8)]
    pool.batch_put(keys, [bytes(4096)] * 8)
    for i in range(11):
        pool.put(f"filler-{i}", bytes(4096))
    held = pool.batch_is_exist(keys)
    assert held == sorted(held, reverse=True), "a prefix must lose pages from its end"
    assert held[0]
    assert not held[-1]


@pytest.mark.needs("exact_lru")
def test_a_prefix_that_was_read_loses_its_end_first(fresh_small: KVPool) -> None:
    pool = fresh_small
    keys = [f"page-{i}" for i in range(4)]
    pool.batch_put(keys, [bytes(4096)] * 4)
    for i in range(11):
        pool.put(f"old-{i}", bytes(4096))
    pool.batch_get(keys)
    for i in range(13):
        pool.put(f"new-{i}", bytes(4096))
    held = pool.batch_is_exist(keys)
    assert held == sorted(held, reverse=True)
    assert (held[0], held[-1]) == (True, False)


def test_no_space_is_said_at_once_with_figures(fresh_small: KVPool) -> None:
    pool = fresh_small
    held = [reserved(pool, f"w{i}", 8192) for i in range(8)]
    [refused] = pool.reserve([("more", 8192)])
    assert isinstance(refused, NoSpace)
    assert "8192" in refused.need
    assert refused.have
    pool.revoke(held)
    assert pool.put("more", bytes(8192)) is Put.STORED


@pytest.mark.needs("evict_on_demand")
def test_too_large_evicts_nothing(fresh_small: KVPool) -> None:
    pool = fresh_small
    pool.put("small", b"x")
    with pytest.raises(ObjectTooLarge):
        pool.put("large", bytes((64 << 10) + 1))
    assert pool.is_exist("small")
    assert pool.stats().evictions == 0
    assert pool.put("all", bytes(64 << 10)) is Put.STORED
    assert len(pool.get("all")) == 64 << 10


def test_what_cannot_help_is_not_evicted(fresh_small: KVPool) -> None:
    pool = fresh_small
    held = reserved(pool, "half", 32 << 10)
    pool.put("small", b"x")
    with pytest.raises(NoSpace):
        pool.put("large", bytes(48 << 10))
    assert pool.is_exist("small")
    pool.revoke([held])


def test_get_into(pool: KVPool) -> None:
    key = name()
    pool.put(key, bytes(range(100)))
    larger, smaller = bytearray(b"\xee" * 128), bytearray(b"\xee" * 64)
    assert pool.get_into(key, larger) == 100
    assert bytes(larger) == bytes(range(100)) + b"\xee" * 28
    with pytest.raises(WrongSize):
        pool.get_into(key, smaller)
    assert smaller == b"\xee" * 64
    [n, missing] = pool.batch_get_into([key, name()], [larger, larger])
    assert n == 100
    assert isinstance(missing, NotFound)


def test_remove(pool: KVPool) -> None:
    key = name()
    pool.put(key, b"x")
    assert pool.batch_remove([key, name(), key]) == [Removed.REMOVED, Removed.MISSING, Removed.MISSING]
    assert pool.batch_get([key]) == [None]


# -- native and converted


def test_lookup_prefers_native_then_the_first_origin(pool: KVPool) -> None:
    key = page()
    assert pool.lookup([key]) == [None]
    pool.put(key.converted(OTHER).text, b"o")
    pool.put(key.converted(BUNDLE).text, b"b")
    assert pool.lookup([key]) == [None], "an approximation is never given unasked"
    assert pool.lookup([key], [BUNDLE, OTHER]) == [Match(key.converted(BUNDLE).text, True)]
    assert pool.lookup([key], [OTHER]) == [Match(key.converted(OTHER).text, True)]
    pool.put(key.text, b"n")
    assert pool.lookup([key], [BUNDLE]) == [Match(key.text, False)]


@pytest.mark.needs("native_replaces_converted")
def test_a_native_page_replaces_converted_ones(pool: KVPool) -> None:
    key = page()
    converted = key.converted(BUNDLE).text
    pool.put(converted, b"approximate")
    with pool.open_read([converted]) as lease:
        pool.put(key.text, b"exact")
        assert not pool.is_exist(converted)
        assert bytes(lease.views[0] or b"") == b"approximate"
    with pytest.raises(NativeExists):
        pool.put(converted, b"late")


def test_a_native_page_that_comes_while_a_converted_one_is_written_wins(pool: KVPool) -> None:
    key = page()
    r = reserved(pool, key.converted(BUNDLE).text, 4)
    pool.put(key.text, b"exact")
    [outcome] = pool.commit([r])
    assert isinstance(outcome, NativeExists)
    assert not pool.is_exist(r.key)


# -- events


def test_events_of_native_pages_of_the_owner(pool: KVPool) -> None:
    owner = f"{next(_names):032x}"
    mine, other = page(owner), page(f"{next(_names):032x}")
    stream = pool.subscribe([owner])
    pool.put(other.text, b"x")
    pool.put(mine.converted(BUNDLE).text, b"x")
    pool.put("no page", b"x")
    pool.put(mine.text, b"xyz")
    pool.put(mine.text, b"xyz")
    assert stream.next(10, 5.0) == [Stored(mine.text, 3)]
    unknown = page(owner)
    pool.lookup([mine, unknown, other])
    assert stream.next(10, 0.0) == []
    pool.lookup([mine, unknown, other], [BUNDLE])
    assert stream.next(10, 5.0) == [Missed(unknown.text)]
    pool.hint([unknown, other])
    assert stream.next(10, 5.0) == [Hinted(unknown.text)]
    stream.close()
    pool.remove("no page")


def test_a_lagging_reader_loses_the_oldest_and_is_told(pool: KVPool) -> None:
    owner = f"{next(_names):032x}"
    keys = [page(owner) for _ in range(10)]
    stream = pool.subscribe([owner], capacity=4)
    pool.batch_put([k.text for k in keys], [b"x"] * 10)
    assert stream.next(2, 5.0) == [Stored(k.text, 1) for k in keys[6:8]]
    assert stream.next(9, 5.0) == [Stored(k.text, 1) for k in keys[8:]]
    assert stream.dropped == 6
    stream.close()


def test_next_waits_no_longer_than_it_is_told(pool: KVPool) -> None:
    stream = pool.subscribe(["f" * 32])
    assert stream.next(10, 0.02) == []
    stream.close()
    with pytest.raises(MoonpoolError):
        stream.next(10, 0.02)


def test_c2c_config(pool: KVPool) -> None:
    assert pool.get_c2c_config() == b"{}"


# -- many threads, odd arguments


def test_threads_that_race_for_the_same_keys_store_each_once(pool: KVPool) -> None:
    keys = [name() for _ in range(250)]
    outcomes: list[PutOutcome] = []

    def work(seed: int) -> None:
        for key in random.Random(seed).sample(keys, len(keys)):
            if not pool.is_exist(key):
                outcomes.extend(pool.batch_put([key], [key.encode()]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert outcomes.count(Put.STORED) == 250
    assert all(o in (Put.STORED, Put.EXISTED) or isinstance(o, KeyBusy) for o in outcomes)
    assert pool.batch_get(keys) == [k.encode() for k in keys]


@pytest.mark.parametrize("key", ["", "x" * 1025, "\ud800"])
def test_what_is_no_key_is_refused_and_harms_nobody(pool: KVPool, key: str) -> None:
    good = name()
    with pool.open_read([good]), pytest.raises(PoolError):
        pool.batch_put([good, key], [b"1", b"2"])
    for verb in (pool.open_read, pool.batch_is_exist, pool.batch_remove):
        with pytest.raises(PoolError):
            verb([key])
    assert pool.put(good, b"1") is Put.STORED


def test_any_text_is_a_key(pool: KVPool) -> None:
    for key in ("é", "日本", "a b\n\0c", "x" * 1024, "mp1:nearly"):
        assert pool.put(key, key.encode()) is Put.STORED
        assert pool.get(key) == key.encode()


def test_batches_and_sizes_are_bounded(pool: KVPool) -> None:
    with pytest.raises(FrameTooLarge):
        pool.batch_is_exist(["k"] * 65537)
    assert pool.batch_is_exist(["k"] * 65536) == [False] * 65536
    for size in (-1, 1 << 60):
        with pytest.raises(WrongSize):
            pool.reserve([("k", size)])
    assert isinstance(pool.reserve([("k", 1 << 48)])[0], ObjectTooLarge)


def test_a_closed_pool_says_so(fresh: Fresh) -> None:
    pool = fresh(1 << 16)
    pool.put("k", b"v")
    pool.close()
    pool.close()
    calls: list[Callable[[], object]] = [
        lambda: pool.get("k"),
        lambda: pool.put("k", b"v"),
        pool.stats,
        lambda: pool.subscribe([]),
    ]
    for call in calls:
        with pytest.raises(PoolClosed):
            call()


def test_what_a_pool_holds_goes_with_it(fresh: Fresh) -> None:
    pool = fresh(1 << 16)
    pool.put("k", b"v")
    lease = pool.open_read(["k"])
    [r] = pool.reserve([("w", 8)])
    assert isinstance(r, Reservation)
    pool.close()
    lease.close()
    pool.revoke([r])
