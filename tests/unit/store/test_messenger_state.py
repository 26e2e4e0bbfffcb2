"""What the property test does not say in so many words: expiry, quarantine, order of eviction, bounds, cost."""

from __future__ import annotations

import time

import pytest

from moonpool.errors import KeyBusy, LeaseExpired, NoSpace
from moonpool.keys import PageKey
from moonpool.store.messenger.leases import Ledger
from moonpool.store.messenger.records import Limits, Reserved
from moonpool.store.messenger.state import MessengerState
from moonpool.store.messenger.subscriptions import MAX_SUBSCRIPTIONS
from moonpool.testing.fake_clock import FakeClock
from moonpool.types import Put, Stored

A, B = 1, 2


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def state(clock: FakeClock) -> MessengerState:
    return MessengerState(4096, clock, Limits(reservation_ttl_s=10))


def put(state: MessengerState, key: str, size: int = 64) -> None:
    got = state.reserve(A, key, size)
    assert isinstance(got, Reserved)
    assert state.commit(A, [got.id]) == [Put.STORED]


def test_a_key_is_busy_until_its_writers_time_is_up(state: MessengerState, clock: FakeClock) -> None:
    assert isinstance(state.reserve(A, "k", 64), Reserved)
    clock.advance(9.9)
    assert isinstance(state.reserve(B, "k", 64), KeyBusy)
    clock.advance(0.1)
    assert isinstance(state.reserve(B, "k", 64), Reserved)


def test_a_slow_writers_space_is_kept_from_others_until_it_is_heard_of(state: MessengerState, clock: FakeClock) -> None:
    slow = state.reserve(A, "k", 2048)
    clock.advance(10)
    fast = state.reserve(B, "k", 1024)
    assert isinstance(slow, Reserved)
    assert isinstance(fast, Reserved)
    assert not slow.offset <= fast.offset < slow.offset + slow.size
    assert isinstance(state.reserve(B, "other", 2048), NoSpace), "the slow writer may still be writing there"
    assert state.commit(B, [fast.id]) == [Put.STORED]
    [late] = state.commit(A, [slow.id])
    assert isinstance(late, LeaseExpired)
    assert isinstance(state.reserve(B, "other", 2048), Reserved)
    state.check_integrity()


def test_the_end_of_a_slow_writers_session_ends_its_quarantine(state: MessengerState, clock: FakeClock) -> None:
    state.reserve(A, "k", 4096)
    clock.advance(10)
    assert isinstance(state.reserve(B, "k", 64), NoSpace), "taking the key over gives no space by itself"
    unfinished = state.end_session(A)
    assert isinstance(state.reserve(B, "k", 64), NoSpace), "a thread of the writer may still be copying"
    state.release(unfinished)
    assert isinstance(state.reserve(B, "k", 4096), Reserved)


def test_a_refused_takeover_leaves_the_first_writer_its_key(state: MessengerState, clock: FakeClock) -> None:
    slow = state.reserve(A, "k", 4096)
    clock.advance(10)
    assert isinstance(state.reserve(B, "k", 64), NoSpace)
    assert isinstance(slow, Reserved)
    assert state.commit(A, [slow.id]) == [Put.STORED]


def test_a_slow_writer_that_nobody_overtook_may_commit(state: MessengerState, clock: FakeClock) -> None:
    slow = state.reserve(A, "k", 64)
    clock.advance(1000)
    assert isinstance(slow, Reserved)
    assert state.commit(A, [slow.id]) == [Put.STORED]


def test_handles_of_another_session_mean_nothing(state: MessengerState) -> None:
    put(state, "k")
    r = state.reserve(A, "w", 64)
    lease, _ = state.open_read(A, ["k"])
    assert isinstance(r, Reserved)
    state.revoke(B, [r.id])
    state.close_read(B, [lease])
    assert isinstance(state.commit(B, [r.id])[0], LeaseExpired)
    assert (state.stats().reads_open, state.stats().writes_open) == (1, 1)


def test_contiguous_space_is_made_out_of_fragments() -> None:
    state = MessengerState(4096, FakeClock(), Limits(high_watermark=1.0))
    for i in range(64):
        put(state, f"k{i}")
    state.remove([f"k{i}" for i in range(0, 64, 2)])
    assert state.stats().largest_free == 64
    put(state, "big", 2048)
    state.check_integrity()


def test_a_lease_closed_late_counts_as_use(state: MessengerState) -> None:
    put(state, "first", 1024)
    put(state, "second", 1024)
    lease, _ = state.open_read(A, ["first"])
    state.close_read(A, [lease])
    put(state, "big", 2048)
    assert state.exist(["first", "second"]) == [True, False]


def test_the_number_of_objects_is_bounded() -> None:
    state = MessengerState(4096, FakeClock(), Limits(max_objects=100))
    for i in range(1000):
        put(state, f"empty-{i}", 0)
    assert state.stats().objects == 100
    assert state.exist(["empty-999", "empty-900", "empty-899"]) == [True, True, False]


def test_handles_of_one_session_are_bounded() -> None:
    ledger: Ledger[int] = Ledger(limit=2)
    ledger.add(A, 1)
    held = ledger.add(A, 2)
    with pytest.raises(NoSpace):
        ledger.add(A, 3)
    assert ledger.take(A, held) == 2
    with pytest.raises(LeaseExpired):
        ledger.take(A, held)
    assert ledger.discard(A, held) is None
    ledger.add(B, 9)
    assert ledger.end(A) == [1]
    assert ledger.end(A) == []
    assert len(ledger) == 1


def test_what_a_master_must_be_told() -> None:
    state = MessengerState(4096, FakeClock(), Limits(changes_kept=2))
    put(state, "a")
    put(state, "b")
    state.remove(["a"])
    put(state, "a")
    state.remove(["b"])
    assert state.take_changes().there == {"a": True, "b": False}
    put(state, "c")
    put(state, "d")
    put(state, "e")
    changes = state.take_changes()
    assert (changes.lost, changes.there) == (True, {}), "past the bound only the whole list tells"
    put(state, "f")
    assert state.take_changes().there == {"f": True}


def test_subscriptions_go_with_their_session(state: MessengerState) -> None:
    key = PageKey("a" * 32, 0, "b" * 32)
    mine = state.events.subscribe(A, ["a" * 32, "c" * 32], 10)
    other = state.events.subscribe(B, ["a" * 32], 10)
    put(state, key.text)
    assert state.events.take(mine, 10) == ([Stored(key.text, 64)], 0)
    state.end_session(A)
    assert state.events.waiting(mine), "who waits must wake and be told"
    with pytest.raises(LeaseExpired):
        state.events.take(mine, 10)
    assert state.events.take(other, 10) == ([Stored(key.text, 64)], 0)
    for _ in range(MAX_SUBSCRIPTIONS - 1):
        state.events.subscribe(B, ["a" * 32], 10)
    with pytest.raises(NoSpace):
        state.events.subscribe(B, ["a" * 32], 10)


def test_evicting_takes_the_same_time_however_many_objects_there_are() -> None:
    def fill(n: int) -> tuple[MessengerState, float]:
        state = MessengerState(64 * n, FakeClock(), Limits(high_watermark=1.0, eviction_ratio=0.0))
        for i in range(n):
            put(state, str(i))
        start = time.perf_counter()
        for i in range(200):
            put(state, f"x{i}")
        return state, time.perf_counter() - start

    fill(1000)
    small, large = fill(1000)[1], fill(100_000)[1]
    assert large < 10 * small, "a ratio, so a slow machine does not matter"
