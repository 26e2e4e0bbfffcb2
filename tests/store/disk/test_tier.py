"""The disk tier's promises, one by one; what the names in brackets stand for is in the field's bug reports."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.errors import ConfigError, WrongSize
from moonpool.store.messenger.disk import DiskTier, OsFiles, holdings, record, scan
from moonpool.store.messenger.disk import tier as tier_module
from moonpool.testing.fake_clock import FakeClock
from moonpool.testing.leaks import eventually, no_leaks
from tests.store.disk.support import (
    KIB,
    MIB,
    Fault,
    FaultyFiles,
    get,
    open_tier,
    path_of,
    pattern,
    put,
    record_paths,
    taken_on_disk,
    temporary_paths,
)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    with no_leaks():
        opened = open_tier(tmp_path / "disk")
        yield opened
        opened.check_integrity()
        opened.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def test_what_was_written_is_read_back(tier: DiskTier, folder: Path) -> None:
    values = {f"key {i}/ü": pattern(f"key {i}/ü", size) for i, size in enumerate([1, 100, 4096, 64 * KIB, MIB])}
    assert all(put(tier, k, v) for k, v in values.items())
    assert {k: get(tier, k) for k in tier.keys()} == values  # noqa: SIM118 - a tier, not a dict
    assert all(k in tier for k in values)
    assert "other" not in tier
    assert tier.size("other") is None
    assert not any(k in str(p) for k in values for p in record_paths(folder)), "keys are no file names"
    stats = tier.stats()
    assert (stats.objects, stats.writes, stats.reads, stats.damaged) == (5, 5, 5, 0)
    assert stats.bytes == taken_on_disk(folder)


def test_h1_an_empty_value_is_not_a_missing_key(tier: DiskTier) -> None:
    assert put(tier, "empty", b"")
    assert tier.size("empty") == 0
    assert tier.read_into("empty", memoryview(bytearray()))
    assert not tier.read_into("missing", memoryview(bytearray()))
    assert get(tier, "empty") == b""
    assert get(tier, "missing") is None


def test_a_buffer_of_another_size_is_refused_and_nothing_is_lost(tier: DiskTier) -> None:
    put(tier, "k", b"12345")
    for size in (4, 6):
        with pytest.raises(WrongSize, match="needed 5 B"):
            tier.read_into("k", memoryview(bytearray(size)))
    assert get(tier, "k") == b"12345"


def test_views_of_any_shape_and_item_size(tier: DiskTier) -> None:
    numbers = memoryview(pattern("k", 800)).cast("d", (10, 10))
    assert tier.write("k", numbers)  # type: ignore[arg-type]  # numbers, to be taken as bytes
    assert get(tier, "k") == numbers.tobytes()


def test_a_second_write_replaces_the_first(tier: DiskTier, folder: Path) -> None:
    put(tier, "k", b"old")
    assert put(tier, "k", b"newer")
    assert get(tier, "k") == b"newer"
    assert len(record_paths(folder)) == 1


def test_a_failed_write_never_leaves_the_outdated_value(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = open_tier(tmp_path, files=files)
    put(tier, "k", b"old")
    files.fault = lambda call, _: Fault() if call == "write" else None
    assert not put(tier, "k", b"new")
    assert get(tier, "k") is None
    tier.close()
    tier = open_tier(tmp_path)
    assert get(tier, "k") is None
    tier.close()


def test_restart_finds_everything_again(folder: Path) -> None:
    values = {f"k{i}": pattern(f"k{i}", 100 * i) for i in range(20)}
    with no_leaks():
        tier = open_tier(folder, fsync=True)
        assert all(put(tier, k, v) for k, v in values.items())
        before = tier.stats().bytes
        tier.close()
        tier = open_tier(folder)
        assert {k: get(tier, k) for k in tier.keys()} == values  # noqa: SIM118
        assert tier.stats().bytes == before == taken_on_disk(folder)
        tier.check_integrity()
        tier.close()


def test_closed_tier_finds_nothing_and_closes_twice(tier: DiskTier) -> None:
    put(tier, "k", b"1")
    tier.close()
    tier.close()
    assert "k" not in tier
    assert tier.keys() == []
    assert not put(tier, "l", b"1")
    assert not tier.read_into("k", memoryview(bytearray(1)))
    assert not tier.remove("k")


# -- what is damaged is dropped and counted


def test_d8_files_deleted_and_truncated_behind_its_back_are_misses(tier: DiskTier, folder: Path) -> None:
    keys = [f"k{i}" for i in range(20)]
    for key in keys:
        put(tier, key, pattern(key, 5000))
    for key in keys[:3]:
        path_of(folder, key).unlink()
    for key in keys[3:5]:
        os.truncate(path_of(folder, key), 3000)
    assert [get(tier, k) == pattern(k, 5000) for k in keys] == [False] * 5 + [True] * 15
    assert tier.stats().dropped == {"vanished": 3, "truncated": 2}
    assert tier.stats().damaged == 5
    assert len(tier) == 15
    assert tier.stats().bytes == taken_on_disk(folder)


@pytest.mark.parametrize(("at", "reason"), [(3, "header"), (65, "header"), (300, "payload")])
def test_d6_one_damaged_record_of_300_costs_one(folder: Path, at: int, reason: str) -> None:
    keys = [f"k{i}" for i in range(300)]
    tier = open_tier(folder, 8 * MIB)
    for key in keys:
        put(tier, key, pattern(key, 4096))
    tier.close()
    flip(path_of(folder, "k7"), at)
    tier = open_tier(folder, 8 * MIB)
    assert sum(get(tier, k) == pattern(k, 4096) for k in keys) == 299
    assert tier.stats().dropped == {reason: 1}
    assert len(record_paths(folder)) == 299
    tier.close()


def flip(path: Path, at: int) -> None:
    """Turn one bit."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


@pytest.mark.parametrize("restart", [False, True])
def test_no_flipped_bit_is_ever_returned(folder: Path, restart: bool) -> None:
    """Every byte of the header, of the key and of a small payload."""
    value = pattern("key", 40)
    tier = open_tier(folder)
    for at in range(64 + 3 + 40):
        assert put(tier, "key", value)
        flip(path_of(folder, "key") if at < 64 or at > 66 else record_paths(folder)[0], at)
        if restart:
            tier.close()
            tier = open_tier(folder)
        assert get(tier, "key") is None, f"byte {at}"
        assert "key" not in tier
        assert record_paths(folder) == []
        stats = tier.stats()
        assert stats.dropped, f"byte {at} is not counted"
        tier.check_integrity()
    tier.close()


def test_a_truncated_record_is_damaged_wherever_it_ends(folder: Path) -> None:
    tier = open_tier(folder)
    for length in (0, 1, 63, 64, 66, 67, 100, 106):
        put(tier, "key", pattern("key", 40))
        tier.close()
        os.truncate(record_paths(folder)[0], length)
        tier = open_tier(folder)
        assert len(tier) == 0
        assert tier.stats().damaged == 1
        assert record_paths(folder) == []
    tier.close()


def test_a_longer_file_is_no_record(folder: Path) -> None:
    tier = open_tier(folder)
    put(tier, "key", b"value")
    tier.close()
    with path_of(folder, "key").open("ab") as f:
        f.write(b"x" * 10_000)
    tier = open_tier(folder)
    assert len(tier) == 0
    tier.close()


def test_a_record_under_another_name_is_dropped(tier: DiskTier, folder: Path) -> None:
    """Files swapped by a careless restore: each header names another key than was asked for."""
    put(tier, "one", b"1" * 10)
    put(tier, "two", b"2" * 10)
    one, two = path_of(folder, "one"), path_of(folder, "two")
    raw = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(raw)
    assert get(tier, "one") is None
    assert get(tier, "two") is None
    assert tier.stats().dropped == {"other key": 2}


def test_a_copy_of_a_record_under_another_name_is_dropped_at_the_start(folder: Path) -> None:
    tier = open_tier(folder)
    put(tier, "k", b"1" * 10)
    tier.close()
    (folder / "0" / ("0" * 32)).write_bytes(path_of(folder, "k").read_bytes())
    tier = open_tier(folder)
    assert get(tier, "k") == b"1" * 10
    assert tier.stats().dropped == {"other key": 1}
    assert tier.stats().bytes == taken_on_disk(folder)
    tier.close()


def test_b5_two_keys_with_one_hash_are_never_mixed_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash with four values only."""

    def weak(key: str) -> str:
        return f"{sum(key.encode()) % 4}" * 32

    for module in (record, tier_module, scan, holdings):
        monkeypatch.setattr(module, "name_of", weak)
    tier = open_tier(folder)
    keys = [f"key{i}" for i in range(12)]
    for key in keys:
        assert put(tier, key, pattern(key, 500))
        assert get(tier, key) == pattern(key, 500)
    assert len(tier) == len(record_paths(folder)) == 4
    assert all(get(tier, k) in (None, pattern(k, 500)) for k in keys)
    assert sum(get(tier, k) is not None for k in keys) == 4
    tier.check_integrity()
    tier.close()


@pytest.mark.parametrize("at", [8, 9])
def test_a14_a_record_of_another_version_misses(folder: Path, at: int) -> None:
    tier = open_tier(folder)
    put(tier, "k", pattern("k", 4096))
    flip(path_of(folder, "k"), at)
    assert get(tier, "k") is None, "a forced read of it"
    assert tier.stats().dropped == {"other version": 1}
    assert tier.stats().damaged == 0
    put(tier, "k", pattern("k", 4096))
    tier.close()
    flip(path_of(folder, "k"), at)
    tier = open_tier(folder)
    assert len(tier) == 0
    assert tier.stats().dropped == {"other version": 1}
    tier.close()


def test_a14_bytes_of_another_layout_miss_though_they_have_the_same_size(folder: Path) -> None:
    old = open_tier(folder, layout="v1/[2,blk,heads,dim]")
    put(old, "k", pattern("k", 4096))
    old.close()
    new = open_tier(folder, layout="v2/packed")
    assert "k" not in new
    assert new.stats().dropped == {"other layout": 1}
    assert new.stats().damaged == 0
    new.close()


def test_a14_a_record_of_another_layout_put_in_place_is_not_read(tmp_path: Path) -> None:
    old, new = open_tier(tmp_path / "old", layout="v1"), open_tier(tmp_path / "new", layout="v2")
    for tier in (old, new):
        put(tier, "k", pattern("k", 4096))
    path_of(tmp_path / "old", "k").rename(path_of(tmp_path / "new", "k"))
    assert get(new, "k") is None
    assert new.stats().dropped == {"other layout": 1}
    old.close()
    new.close()


# -- what was removed stays away


def test_b6_removing_one_tenants_keys_leaves_the_others_also_after_a_restart(folder: Path) -> None:
    tier = open_tier(folder, fsync=True)
    a, b = [f"a\x1f{i}" for i in range(20)], [f"b\x1f{i}" for i in range(20)]
    for key in a + b:
        put(tier, key, pattern(key, 3000))
    assert tier.remove_many(a) == [True] * 20
    assert tier.remove_many(a + b[:1]) == [False] * 20 + [True]
    assert not tier.remove("a\x1f0")
    for _ in range(2):
        assert sorted(tier.keys()) == sorted(b[1:])
        assert all(get(tier, k) == pattern(k, 3000) for k in b[1:])
        assert len(record_paths(folder)) == 19
        tier.close()
        tier = open_tier(folder)
    tier.close()


def test_b6_with_fsync_removals_are_made_to_last_folder_by_folder(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = open_tier(tmp_path, files=files, fsync=True)
    keys = [f"k{i}" for i in range(200)]
    for key in keys:
        put(tier, key, b"1")
    files.calls.clear()
    tier.remove_many(keys)
    assert files.calls.count("unlink") == 200
    assert files.calls.count("fsync folder") == 16
    tier.close()


class Gate(OsFiles):
    """Holds calls of one kind until told to go on."""

    def __init__(self) -> None:
        self.fsync_entered, self.fsync_go = threading.Event(), threading.Event()
        self.read_entered, self.read_go = threading.Event(), threading.Event()
        self.read_go.set()
        self.fsync_go.set()

    def hold_fsync(self) -> None:
        self.fsync_go.clear()

    def hold_read(self) -> None:
        self.read_go.clear()
        self.read_entered.clear()

    def fsync(self, fd: int) -> None:
        self.fsync_entered.set()
        assert self.fsync_go.wait(20)
        super().fsync(fd)

    def read(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
        done = super().read(fd, buffers, offset)
        self.read_entered.set()
        assert self.read_go.wait(20)
        return done


@pytest.mark.parametrize("meanwhile", ["removed", "written anew"])
def test_a_write_that_is_overtaken_does_not_appear(tmp_path: Path, meanwhile: str) -> None:
    gate = Gate()
    tier = open_tier(tmp_path, files=gate, fsync=True)
    gate.fsync_entered.clear()
    gate.hold_fsync()
    results: list[bool] = []
    writer = threading.Thread(target=lambda: results.append(put(tier, "k", b"old")))
    writer.start()
    assert gate.fsync_entered.wait(20)
    if meanwhile == "removed":
        tier.remove("k")
    else:
        newer = threading.Thread(target=lambda: results.append(put(tier, "k", b"new")))
        newer.start()
        assert eventually(lambda: len(temporary_paths(tmp_path)) == 2)
    gate.fsync_go.set()
    writer.join()
    if meanwhile == "removed":
        assert results == [False]
        assert get(tier, "k") is None
    else:
        newer.join()
        assert sorted(results) == [False, True]
        assert get(tier, "k") == b"new"
    assert tier.stats().write_failures == 0, "nothing failed"
    tier.check_integrity()
    assert tier.stats().bytes == taken_on_disk(tmp_path)
    tier.close()


def test_close_waits_for_a_write_under_way(tmp_path: Path) -> None:
    gate = Gate()
    tier = open_tier(tmp_path, files=gate, fsync=True)
    put(tier, "earlier", b"1")
    gate.fsync_entered.clear()
    gate.hold_fsync()
    results: list[bool] = []
    writer = threading.Thread(target=lambda: results.append(put(tier, "k", b"value")))
    writer.start()
    assert gate.fsync_entered.wait(20)
    closer = threading.Thread(target=tier.close)
    closer.start()
    assert eventually(lambda: "earlier" not in tier), "close has begun"
    assert not put(tier, "later", b"1")
    assert closer.is_alive(), "it would let another owner in while this one writes"
    gate.fsync_go.set()
    writer.join()
    closer.join()
    assert results == [True]
    tier = open_tier(tmp_path)
    assert get(tier, "k") == b"value"
    tier.close()


# -- bounded


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


# -- many at once


def test_many_threads_never_see_a_wrong_byte(folder: Path) -> None:
    keys = [f"k{i}" for i in range(12)]
    tier = open_tier(folder, 19 * 4096 + 8 * (12_288 + 256))
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            key = rng.choice(keys)
            action = rng.random()
            if action < 0.4:
                put(tier, key, pattern(key, 9000))
            elif action < 0.9:
                out = bytearray(9000)
                if tier.read_into(key, memoryview(out)) and out != pattern(key, 9000):
                    wrong.append(key)
            else:
                tier.remove_many(rng.sample(keys, 2))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert tier.stats().damaged == 0
    assert tier.stats().reads > 100
    tier.check_integrity()
    assert tier.stats().bytes == taken_on_disk(folder)
    assert temporary_paths(folder) == []
    tier.close()


def test_a7_returning_sessions_read_their_own_bytes(folder: Path) -> None:
    """50 sessions of 3 turns interleaved, with room for a fraction of them."""
    tier, rng = open_tier(folder, 2 * MIB), random.Random(3)
    turns = [(s, t) for s in range(50) for t in range(3)]
    rng.shuffle(turns)
    hits = 0
    for session, _ in turns:
        for block in range(4):
            key = f"session{session}/block{block}"
            found = get(tier, key)
            hits += found is not None
            assert found in (None, pattern(key, 20_000))
            if found is None:
                assert put(tier, key, pattern(key, 20_000))
    assert hits
    assert tier.stats().evicted
    tier.close()


def test_a5_what_is_listed_can_be_read(folder: Path) -> None:
    tier = open_tier(folder, 2 * MIB)
    for i in range(40):
        put(tier, f"k{i}", pattern(f"k{i}", 100_000))
    listed = tier.keys()
    assert 0 < len(listed) < 40
    assert all(get(tier, k) == pattern(k, 100_000) for k in listed)
    assert not any(f"k{i}" in tier for i in range(40) if f"k{i}" not in listed)
    tier.close()
