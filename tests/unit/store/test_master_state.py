"""The index: membership, expiry, the master's own stall."""

from __future__ import annotations

import pytest

from moonpool.errors import NotFound
from moonpool.store.master.state import MasterState
from moonpool.testing.fake_clock import FakeClock
from moonpool.types import MessengerInfo


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def state(clock: FakeClock) -> MasterState:
    state = MasterState(clock, expiry_s=10)
    for name in ("m0", "m1"):
        state.register(info(name), "g0")
    return state


def info(name: str, socket: str = "") -> MessengerInfo:
    return MessengerInfo(name=name, socket=socket or f"/{name}")


def names(state: MasterState) -> list[str]:
    return [m.name for m in state.messengers()]


def test_who_holds_what(state: MasterState) -> None:
    state.publish("m0", ["a", "b"], [])
    state.publish("m1", ["b", "c"], [])
    assert state.locate(["a", "b", "c", "d", "b"]) == [["m0"], ["m0", "m1"], ["m1"], [], ["m0", "m1"]]
    state.publish("m0", [], ["b", "never there"])
    assert state.locate(["b"]) == [["m1"]]
    state.check_integrity()


def test_a_messenger_that_registers_again_starts_empty(state: MasterState) -> None:
    state.publish("m0", ["a"], [])
    state.register(info("m0", "/elsewhere"), "g1")
    assert state.locate(["a"]) == [[]]
    assert state.messengers() == [info("m0", "/elsewhere"), info("m1")]
    state.check_integrity()


def test_silence_is_death(state: MasterState, clock: FakeClock) -> None:
    state.publish("m0", ["a"], [])
    for _ in range(11):
        clock.advance(1)
        assert state.seen("m1")
        state.tick()
    assert names(state) == ["m1"]
    assert state.locate(["a"]) == [[]]
    assert not state.seen("m0")
    with pytest.raises(NotFound):
        state.publish("m0", ["a"], [])
    state.check_integrity()


def test_the_masters_own_stall_kills_nobody(state: MasterState, clock: FakeClock) -> None:
    state.publish("m0", ["a"], [])
    clock.advance(100)
    assert state.locate(["a"]) == [["m0"]]
    clock.advance(5)
    assert len(state.messengers()) == 2


def test_a_messenger_whose_connection_broke_is_gone_at_once_but_not_its_successor(state: MasterState) -> None:
    state.publish("m0", ["a"], [])
    state.register(info("m0"), "g1")
    state.publish("m0", ["b"], [])
    state.forget("m0", "g0")
    assert state.locate(["a", "b"]) == [[], ["m0"]]
    state.forget("m0", "g1")
    assert state.locate(["a", "b"]) == [[], []]
    state.check_integrity()


def test_what_a_forgotten_messenger_held_is_cleared_away(state: MasterState) -> None:
    state.publish("m0", [f"k{i}" for i in range(10_000)], [])
    state.publish("m1", ["k1", "k2"], [])
    state.forget("m0")
    for _ in range(4):
        state.tick()
    assert state.keys == 2
    assert state.locate(["k0", "k1"]) == [[], ["m1"]]
    state.check_integrity()


def test_a_quota_is_shared_by_what_the_others_hold(state: MasterState) -> None:
    state.set_quota("a", 100)
    state.report(info("m0"), {"a": 30, "b": 7})
    state.report(info("m1"), {"a": 50})
    assert state.quotas_for("m0") == {"a": 50}
    assert state.quotas_for("m1") == {"a": 70}
    assert state.quotas_for("a newcomer") == {"a": 20}
    assert state.quotas() == {"a": (100, 80), "b": (-1, 7)}
    state.set_quota("a", None)
    assert state.quotas_for("m0") == {}
