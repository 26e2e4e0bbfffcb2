"""What is damaged, or not what it should be, is dropped and counted; no wrong byte is returned."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moonpool.store.messenger.disk import DiskTier, holdings, record, scan
from moonpool.store.messenger.disk import tier as tier_module
from tests.store.disk.support import (
    MIB,
    get,
    open_tier,
    path_of,
    pattern,
    put,
    record_paths,
    taken_on_disk,
)


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
