"""The index: membership, expiry, the master's own stall."""

from __future__ import annotations

import pytest

from moonpool.errors import NotFound
from moonpool.store.master.state import MasterState
from moonpool.testing.fake_clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def state(clock: FakeClock) -> MasterState:
    state = MasterState(clock, expiry_s=10)
    for name in ("m0", "m1"):
        state.register(name, f"/{name}", "g0")
    return state


def test_who_holds_what(state: MasterState) -> None:
    state.publish("m0", ["a", "b"], [])
    state.publish("m1", ["b", "c"], [])
    assert state.locate(["a", "b", "c", "d", "b"]) == [["m0"], ["m0", "m1"], ["m1"], [], ["m0", "m1"]]
    state.publish("m0", [], ["b", "never there"])
    assert state.locate(["b"]) == [["m1"]]
    state.check_integrity()


def test_a_messenger_that_registers_again_starts_empty(state: MasterState) -> None:
    state.publish("m0", ["a"], [])
    state.register("m0", "/elsewhere", "g1")
    assert state.locate(["a"]) == [[]]
    assert state.messengers() == [("m0", "/elsewhere"), ("m1", "/m1")]
    state.check_integrity()


def test_silence_is_death(state: MasterState, clock: FakeClock) -> None:
    state.publish("m0", ["a"], [])
    for _ in range(11):
        clock.advance(1)
        state.heartbeat("m1")
        state.tick()
    assert state.messengers() == [("m1", "/m1")]
    assert state.locate(["a"]) == [[]]
    with pytest.raises(NotFound):
        state.heartbeat("m0")
    with pytest.raises(NotFound):
        state.publish("m0", ["a"], [])
    state.check_integrity()


def test_the_masters_own_stall_kills_nobody(state: MasterState, clock: FakeClock) -> None:
    state.publish("m0", ["a"], [])
    clock.advance(100)
    assert state.locate(["a"]) == [["m0"]]
    clock.advance(5)
    assert len(state.messengers()) == 2
