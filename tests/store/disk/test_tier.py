"""The disk tier's promises, one by one: what is written, read, replaced and removed."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from moonpool.errors import WrongSize
from moonpool.store.messenger.disk import DiskTier
from moonpool.testing.leaks import eventually, no_leaks
from tests.store.disk.support import (
    KIB,
    MIB,
    Fault,
    FaultyFiles,
    Gate,
    get,
    open_tier,
    pattern,
    put,
    record_paths,
    taken_on_disk,
    temporary_paths,
)


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
