"""C: leaks. What was taken comes back, also where something fails."""

from __future__ import annotations

import random
import tracemalloc

from moonpool.store.messenger.allocator import rounded
from moonpool.store.messenger.records import Limits, Reserved
from moonpool.store.messenger.state import MessengerState
from moonpool.testing.fake_clock import FakeClock
from tests.field.support import KIB, MIB, SESSION, put, state_of


def test_tens_of_thousands_of_cycles_with_failures_leak_nothing_and_keep_the_hit_rate() -> None:
    """C3: 16 KiB objects in 1 MiB, 1 % of the writers fail, half of them without a word."""
    state, r = state_of(MIB), random.Random(1)
    hits = []
    for i in range(20_000):
        key = f"k{r.randrange(96)}"
        lease, spans = state.open_read(SESSION, [key])
        hits.append(spans[0] is not None)
        state.close_read(SESSION, [lease] if lease else [])
        if not hits[-1]:
            session = i + 2
            got = state.reserve(session, key, 16 * KIB)
            assert isinstance(got, Reserved)
            if r.random() >= 0.01:
                state.commit(session, [got.id])
            elif r.random() < 0.5:
                state.revoke(session, [got.id])
            state.release(state.end_session(session))
    assert sum(hits[-1000:]) >= sum(hits[:1000]) - 50
    assert state.stats().used == len(list(state.keys())) * rounded(16 * KIB)
    state.check_integrity()


def test_the_memory_for_keys_is_bounded_however_many_come() -> None:
    """C10: tables, index changes and pins, each at most as large as `max_objects` makes it."""
    state = MessengerState(64 * MIB, FakeClock(), Limits(max_objects=3_000, changes_kept=1_000))
    sizes = []
    tracemalloc.start()
    try:
        for i in range(20_000):
            put(state, f"key-{i}", 1)
            if i in (6_000, 19_999):
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert state.stats().objects == 3_000
    assert state.exist(["key-0", "key-19999"]) == [False, True], "the oldest went"
    assert sizes[1] < 1.1 * sizes[0]
