"""The tier stays within its capacity, and evicts what was used longest ago."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from moonpool.errors import ConfigError
from moonpool.store.messenger.disk import DiskTier, OsFiles
from moonpool.testing.fake_clock import FakeClock
from moonpool.testing.leaks import no_leaks
from tests.store.disk.support import (
    MIB,
    Gate,
    get,
    open_tier,
    path_of,
    pattern,
    put,
    taken_on_disk,
)


def test_f9_usage_stays_below_capacity_whatever_is_put(folder: Path) -> None:
    capacity, rng = MIB, random.Random(5)
    seen: list[int] = []

    class Watching(OsFiles):
        """Looks at the disk after each write of bytes, temporary files and all, as `du` does."""

        def write(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
            done = super().write(fd, buffers, offset)
            seen.append(sum(p.lstat().st_blocks * 512 for p in [folder, *folder.rglob("*")]))
            return done

    tier = open_tier(folder, capacity, files=Watching())
    for i in range(300):
        size = rng.choice([0, 1, 4000, 4096, 50_000, 200_000])
        assert put(tier, f"k{i}", pattern(f"k{i}", size))
        assert tier.stats().bytes == taken_on_disk(folder) <= capacity
    assert max(seen) <= capacity
    assert max(seen) > capacity // 2, "the tier was full"
    assert tier.stats().evicted > 100
    assert all(get(tier, k) is not None for k in tier.keys())  # noqa: SIM118
    tier.check_integrity()
    tier.close()


def test_an_object_larger_than_the_tier_is_refused_and_evicts_nothing(tier: DiskTier) -> None:
    put(tier, "k", b"1")
    assert not put(tier, "large", bytes(4 * MIB))
    assert tier.stats().failures == {"too large": 1}
    assert tier.keys() == ["k"]
    assert not put(tier, "k" * 70_000, b"1")
    assert tier.stats().failures == {"too large": 2}


def test_least_recently_used_goes_first(folder: Path) -> None:
    tier = open_tier(folder, 19 * 4096 + 10 * (8192 + 256))
    for i in range(10):
        put(tier, f"k{i}", bytes(5000))
    get(tier, "k0")
    get(tier, "k2")
    assert "k1" in tier  # asking protects nothing
    for i in range(10, 14):
        put(tier, f"k{i}", bytes(5000))
    assert tier.keys() == ["k0", "k2", *(f"k{i}" for i in range(6, 14))]
    tier.close()


def test_restart_keeps_the_order_also_of_reads(folder: Path) -> None:
    clock = FakeClock()
    tier = open_tier(folder, clock=clock)
    for i in range(10):
        put(tier, f"k{i}", bytes(5000))
        os.utime(path_of(folder, f"k{i}"), (1000 + i, 1000 + i))
    get(tier, "k0")
    assert path_of(folder, "k0").stat().st_mtime == 1000, "within a minute of the write, reads leave the stamp alone"
    clock.advance(61)
    get(tier, "k0")
    tier.close()
    tier = open_tier(folder, 19 * 4096 + 3 * (8192 + 256))  # a smaller capacity: the rest goes at once
    assert sorted(tier.keys()) == ["k0", "k8", "k9"]
    put(tier, "new", bytes(5000))
    assert sorted(tier.keys()) == ["k0", "k9", "new"]
    assert tier.stats().bytes == taken_on_disk(folder)
    tier.close()


def test_what_is_being_read_is_not_evicted_and_its_bytes_are_not_given_away(folder: Path) -> None:
    gate = Gate()
    tier = open_tier(folder, 19 * 4096 + 3 * (8192 + 256), files=gate)
    for key in "abc":
        put(tier, key, pattern(key, 5000))
    gate.hold_read()
    results: list[bytes | None] = []
    reader = threading.Thread(target=lambda: results.append(get(tier, "a")))
    reader.start()
    assert gate.read_entered.wait(20)
    assert put(tier, "d", bytes(5000))
    assert sorted(tier.keys()) == ["a", "c", "d"], "the next in line went instead"
    assert not put(tier, "e", bytes(20_000))
    assert tier.stats().failures == {"no room": 1}
    assert sorted(tier.keys()) == ["a", "c", "d"], "a write that cannot fit evicts nothing"
    assert tier.remove("a")
    assert tier.stats().bytes == 19 * 4096 + 3 * (8192 + 256), "the open file still has its blocks"
    gate.read_go.set()
    reader.join()
    assert results == [pattern("a", 5000)], "a read that began before the removal is whole"
    assert tier.stats().bytes == taken_on_disk(folder) == 19 * 4096 + 2 * (8192 + 256)
    assert tier.stats().damaged == 0
    tier.close()


@pytest.mark.parametrize("capacity", [0, 19 * 4096, 1 << 60])
def test_a_capacity_that_cannot_be_is_refused_at_the_start(folder: Path, capacity: int) -> None:
    with no_leaks(), pytest.raises(ConfigError, match="capacity does not fit its file system"):
        open_tier(folder, capacity)
    open_tier(folder).close()
