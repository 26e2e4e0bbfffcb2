"""A put that is refused changes nothing; what is copied to the tier below stands in the way like what is read."""

from __future__ import annotations

import pytest

from moonpool.errors import NoSpace, ProtocolError
from moonpool.store.messenger.records import Limits, Reserved
from moonpool.store.messenger.service import MessengerService
from moonpool.store.messenger.state import MessengerState
from moonpool.store.messenger.tenants import scoped
from moonpool.testing.fake_clock import FakeClock
from moonpool.transfer.segment import Segment
from moonpool.types import Pin, Put, PutOptions
from moonpool.wire import messages as m

A = 1


class Below(dict[str, int]):
    def size(self, key: str) -> int | None:
        return self.get(key)


def put(state: MessengerState, key: str, size: int = 64, options: PutOptions = PutOptions()) -> None:
    got = state.reserve(A, key, size, options)
    assert isinstance(got, Reserved), got
    assert state.commit(A, [got.id]) == [Put.STORED]


def test_what_is_being_copied_down_cannot_be_evicted_and_the_error_says_so() -> None:
    state = MessengerState(4096, FakeClock(), Limits(), Below())
    put(state, "a", 64)
    put(state, "b", 64)
    [a] = state.take_unbacked(1)
    assert isinstance(state.reserve(A, "whole", 4096), NoSpace)
    assert state.exist(["a", "b"]) == [True, True]
    state.backed([a])
    assert isinstance(state.reserve(A, "whole", 4096), Reserved)


def test_a_quota_evicts_nothing_for_what_does_not_fit_anyway() -> None:
    state = MessengerState(4096, FakeClock())
    [mine, whole] = scoped("t", ["mine", "whole"])
    put(state, mine, 1024)
    put(state, "pinned", 64, PutOptions(pin=Pin.HARD))
    state.set_quotas({"t": 4096})
    assert isinstance(state.reserve(A, whole, 4096), NoSpace)
    assert state.exist([mine]) == [True]


def test_too_many_objects_evict_nothing_in_vain() -> None:
    state = MessengerState(4096, FakeClock(), Limits(max_objects=2))
    put(state, "pinned", 64, PutOptions(pin=Pin.HARD))
    assert isinstance(state.reserve(A, "w", 64), Reserved)
    assert isinstance(state.reserve(A, "one more", 64), NoSpace)
    put_back = state.stats()
    assert (put_back.evictions, put_back.used) == (0, 128)


@pytest.mark.parametrize("late", [False, True])
def test_a_copy_of_what_is_being_replaced_does_not_stay(late: bool) -> None:
    """The copying began before the replacement; whichever ends first, the old bytes are not left below."""
    below = Below()
    state = MessengerState(4096, FakeClock(), Limits(), below)
    put(state, "a", 64)
    [old] = state.take_unbacked(1)
    got = state.reserve(A, "a", 100, PutOptions(replace=True))
    assert isinstance(got, Reserved)
    assert state.replaced_below(A, [got.id]) == [], "the copy is not there yet"
    below["a"] = 64  # now it is
    if late:
        state.commit(A, [got.id])
    assert not state.copied(old)


def test_a_session_that_writes_does_not_change_its_tenant() -> None:
    segment = Segment.create(1 << 16)
    service = MessengerService(segment)
    session = service.open_session()
    service.handle(session, m.Hello("a"))
    service.handle(session, m.Reserve([("k", 1), ("l", 1)]))
    with pytest.raises(ProtocolError):
        service.handle(session, m.Hello("b"))
    service.close_session(session)
    service.close()
    segment.close()


@pytest.mark.parametrize("gone", ["removed", "dropped by the tier"])
def test_what_goes_while_it_comes_up_from_below(gone: str) -> None:
    """Removed: it does not come back. Dropped below only: it is there, and the index hears of it again."""
    below = Below(k=100)
    state = MessengerState(4096, FakeClock(), Limits(), below)
    got = state.begin_load(A, "k")
    assert isinstance(got, Reserved)
    del below["k"]
    if gone == "removed":
        state.remove(["k"])
    state.gone_below(["k"])
    assert state.take_changes().there == {"k": False}
    lease, span = state.end_load(A, got.id, 0)
    assert (span is None) == (gone == "removed")
    assert state.has("k") == (span is not None)
    assert state.take_changes().there == ({} if gone == "removed" else {"k": True})
    state.close_read(A, [lease])
    state.check_integrity()
