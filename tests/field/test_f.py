"""F: eviction and capacity."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from moonpool.errors import NoSpace
from moonpool.store.messenger.allocator import rounded
from moonpool.store.messenger.disk import DiskConfig, DiskTier
from moonpool.store.messenger.records import Limits, Reserved
from moonpool.store.messenger.service import MessengerService
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.transfer.segment import Segment
from moonpool.types import Pin, PutOptions, Removed
from moonpool.wire import messages as m
from tests.field.support import KIB, MIB, SESSION, put, state_of, there
from tests.store.disk.support import Fault, FaultyFiles

SOFT = PutOptions(pin=Pin.SOFT, soft_pin_ttl_s=60.0)
HARD = PutOptions(pin=Pin.HARD)


def test_pressure_takes_the_normal_then_the_soft_pinned_and_never_the_hard_pinned() -> None:
    """F4"""
    state = state_of(70 * 64)
    hard, soft = [f"h{i}" for i in range(10)], [f"s{i}" for i in range(10)]
    normal = [f"n{i}" for i in range(50)]
    for keys, options in ((hard, HARD), (soft, SOFT), (normal, PutOptions())):
        assert all(put(state, k, 64, options) for k in keys)
    for i in range(50):
        assert there(state, soft) == 10, "a soft-pinned one went before a normal one"
        assert put(state, f"new{i}", 64, HARD)
    assert there(state, normal) == 0
    for i in range(10):
        assert put(state, f"newer{i}", 64, HARD)
    assert (there(state, soft), there(state, hard)) == (0, 10)
    assert isinstance(state.reserve(SESSION, "one more", 64), NoSpace)


def test_reading_does_not_make_a_soft_pin_last_longer() -> None:
    """F4"""
    state = state_of(2 * 64)
    clock = state._clock
    assert put(state, "s", 64, SOFT)
    assert put(state, "n", 64)
    clock.advance(59.0)  # type: ignore[attr-defined]
    lease, _ = state.open_read(SESSION, ["s"])
    state.close_read(SESSION, [lease])
    clock.advance(2.0)  # type: ignore[attr-defined]
    assert put(state, "x", 64)
    assert state.exist(["s", "n"]) == [False, True], "its time was up, and it had been written first"


def test_what_could_not_be_written_down_is_lost_and_counted_when_it_is_evicted(tmp_path: Path) -> None:
    """F6"""
    with no_leaks():
        files = FaultyFiles()
        tier = DiskTier.open(DiskConfig(folder=str(tmp_path / "disk"), capacity=64 * MIB), files=files)
        files.fault = lambda call, _: Fault(errno.EIO) if call == "write" else None
        segment = Segment.create(4 * MIB)
        service = MessengerService(segment, disk=tier)
        session = service.open_session()
        service.handle(session, m.Hello())
        keys = [f"k{i}" for i in range(32)]
        for key in keys:
            reply = service.handle(session, m.Reserve([(key, 512 * KIB)]))
            assert isinstance(reply, m.Reserved)
            [span] = reply.spans([512 * KIB])
            assert isinstance(span, m.Span)
            segment.span(span.offset, 4)[:] = key.ljust(4).encode()
            service.handle(session, m.Commit([span.id]))
        assert eventually(lambda: service.stats().disk_failures > 0)
        flags = service.handle(session, m.Exist(keys))
        assert isinstance(flags, m.Flags)
        stats = service.stats()
        assert stats.disk_objects == 0
        assert flags.values.count(True) == stats.objects
        assert stats.lost_unspilled == stats.evictions == flags.values.count(False) > 0
        service.close_session(session)
        service.close()
        segment.close()


def test_figures_of_use_follow_every_operation_and_end_at_zero() -> None:
    """F7"""
    state, r = state_of(MIB, Limits()), random.Random(7)
    open_: list[int] = []
    for i in range(10_000):
        key = f"k{r.randrange(64)}"
        match r.randrange(4):
            case 0 | 1:
                put(state, key, r.choice((0, 1, 64, 5000, 70_000)), PutOptions(replace=r.random() < 0.3))
            case 2:
                state.remove([key])
            case _:
                lease, _ = state.open_read(SESSION, [key])
                open_ += [lease] if lease else []
                if len(open_) > 3:
                    state.close_read(SESSION, [open_.pop(0)])
        if i % 100 == 0:
            state.check_integrity()
            assert 0 <= sum(state.used_by_tenant().values()) <= state.stats().used <= MIB
    state.close_read(SESSION, open_)
    assert set(state.remove(state.keys())) <= {Removed.REMOVED}
    assert (state.stats().used, state.used_by_tenant(), state.stats().objects) == (0, {}, 0)


def test_room_in_pieces_is_made_one_piece_by_evicting_and_else_called_that() -> None:
    """F8"""
    state = state_of(16 * MIB)
    large = [f"l{i}" for i in range(15)]
    for i, key in enumerate(large):
        assert put(state, f"s{i}", 64 * KIB)
        assert put(state, key, MIB)
    state.remove([f"s{i}" for i in range(15)])
    lease, _ = state.open_read(SESSION, large[::2])
    got = state.reserve(SESSION, "two", 4 * MIB)
    assert isinstance(got, NoSpace)
    have = got.fields()["have"]
    assert "in one piece" in have
    assert there(state, large) == 15, "evicting would not have helped"
    state.close_read(SESSION, [lease])
    got = state.reserve(SESSION, "two", 2 * MIB)
    assert isinstance(got, Reserved)
    assert there(state, large) >= 7, "in the order of their use, until two neighbours had gone"
    assert state.stats().used >= rounded(2 * MIB)


@pytest.mark.parametrize("ratio", [0.0, 0.05])
def test_a_full_pool_takes_the_next_put(ratio: float) -> None:
    """F2, at the level of the state; the error's figures are in the contract tests"""
    state = state_of(MIB, Limits(eviction_ratio=ratio))
    assert all(put(state, f"k{i}", 60 * KIB) for i in range(200))
