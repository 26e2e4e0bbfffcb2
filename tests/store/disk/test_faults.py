"""A disk that fails: at every call of a scenario in turn, at every class of bytes, once or for good.

After each: no wrong byte, what is said to be taken is what lies there, and the tier works again when the disk does.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from moonpool.errors import DiskError
from moonpool.store.messenger.disk import DiskTier
from moonpool.testing.leaks import no_leaks
from tests.store.disk.support import (
    MIB,
    Fault,
    FaultyFiles,
    Model,
    get,
    open_tier,
    pattern,
    put,
    record_paths,
    taken_on_disk,
    temporary_paths,
)

CAPACITY = 19 * 4096 + 3 * (8192 + 256)
SIZE = 5000
"""Of each value: two blocks with its header. Three of them fill the tier."""


def scenario(model: Model) -> None:
    """Every operation: writes, a read, an eviction, a replacement, a removal."""
    for key in "abc":
        model.write(key, pattern(key, SIZE))
    model.read("a")
    model.write("d", pattern("d", SIZE))
    model.write("c", pattern("c", SIZE, 1))
    model.read("c")
    model.remove(["d", "none"])
    model.write("e", pattern("e", SIZE))
    model.read("e")


def healthy(model: Model, folder: Path) -> None:
    """The disk is well again: everything works, and the books balance after what was left has been removed."""
    model.check()
    for key in "xyz":
        assert model.write(key, pattern(key, SIZE)), model.tier.stats()
        assert model.read(key) == pattern(key, SIZE)
    model.remove(["y"])
    model.check()
    assert model.tier.stats().left_behind == 0
    assert model.tier.stats().bytes == taken_on_disk(folder)
    assert temporary_paths(folder) == []
    model.tier.check_integrity()


def restarted(model: Model, folder: Path) -> None:
    model.tier.close()
    model.tier = open_tier(folder, CAPACITY)
    model.check()
    model.tier.close()


def calls_of_scenario(folder: Path) -> list[str]:
    files = FaultyFiles()
    tier = open_tier(folder, CAPACITY, files=files, fsync=True)
    start = len(files.calls)
    scenario(Model(tier))
    calls = files.calls[start:]
    tier.close()
    return calls


def test_the_scenario_has_every_class_of_call(tmp_path: Path) -> None:
    assert {"open", "write", "fsync", "close", "rename", "open folder", "fsync folder", "read", "unlink"} == set(
        calls_of_scenario(tmp_path)
    )


_CODES = (errno.EIO, errno.ENOSPC)
_FAULTS = {
    **{errno.errorcode[e]: partial(Fault, e) for e in _CODES},
    **{f"{errno.errorcode[e]} though it happened": partial(Fault, e, happens=True) for e in _CODES},
    # The header is 65 bytes long: nothing, within it, its last byte, between, within the payload, all but one byte.
    **{f"ENOSPC after {n} B": partial(Fault, errno.ENOSPC, bytes=n) for n in (0, 10, 64, 65, 66, 3000, 65 + SIZE - 1)},
}


def test_a_write_is_acknowledged_after_its_bytes_and_its_name_are_on_disk(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = open_tier(tmp_path, files=files, fsync=True)
    files.calls.clear()
    assert put(tier, "k", b"1")
    assert files.calls == ["open", "write", "fsync", "close", "rename", "open folder", "fsync folder", "close"]
    files.fault = lambda call, _: Fault() if call == "fsync folder" else None
    assert not put(tier, "l", b"1")
    assert "l" not in tier
    assert tier.stats().failures == {"EIO": 1}
    tier.close()


@pytest.mark.parametrize("make", _FAULTS.values(), ids=_FAULTS)
def test_one_failure_at_every_call_in_turn(tmp_path: Path, make: Callable[[], Fault]) -> None:
    calls = calls_of_scenario(tmp_path / "plain")
    needs_bytes = make().bytes is not None
    with no_leaks():
        for at, call in enumerate(calls):
            if not needs_bytes or call in ("read", "write"):
                fail_at(tmp_path / f"at-{at}", at, make())


def fail_at(folder: Path, at: int, fault: Fault) -> None:
    files = FaultyFiles()
    model = Model(open_tier(folder, CAPACITY, files=files, fsync=True))
    first = len(files.calls) + at
    # A fault of bytes lets a short call through first; the error comes with the next one.
    files.fault = lambda _, number: fault if first <= number <= first + (fault.bytes is not None) else None
    scenario(model)
    assert model.tier.stats().bytes >= taken_on_disk(folder)
    healthy(model, folder)
    restarted(model, folder)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EMFILE])
@pytest.mark.parametrize(
    "kinds",
    [
        {"open"},
        {"write"},
        {"fsync"},
        {"close"},
        {"rename"},
        {"open folder"},
        {"fsync folder"},
        {"read"},
        {"unlink"},
        {"touch"},
        {"write", "fsync", "rename", "unlink", "open folder"},
        {"open", "read"},
        {"open", "close", "write", "fsync", "rename", "unlink", "read", "open folder", "fsync folder", "touch"},
    ],
    ids=lambda kinds: "+".join(sorted(kinds)),
)
@pytest.mark.parametrize("capacity", [CAPACITY, 4 * MIB], ids=["full", "roomy"])
def test_a_kind_of_call_that_fails_for_a_while(tmp_path: Path, kinds: set[str], error: int, capacity: int) -> None:
    with no_leaks():
        files = FaultyFiles()
        model = Model(open_tier(tmp_path, capacity, files=files, fsync=True))
        scenario(model)
        files.fault = lambda call, _: Fault(error) if call in kinds else None
        scenario(model)
        model.check()
        scenario(model)
        assert model.tier.stats().bytes >= taken_on_disk(tmp_path)
        files.fault = lambda call, _: None
        healthy(model, tmp_path)
        restarted(model, tmp_path)


def test_f6_when_all_writes_fail_nothing_is_there_and_failures_are_counted(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = open_tier(tmp_path, files=files)
    files.fault = lambda call, _: Fault() if call == "write" else None
    for i in range(10):
        assert not put(tier, f"k{i}", b"1")
        assert f"k{i}" not in tier
    assert tier.stats().failures == {"EIO": 10}
    assert tier.stats().write_failures == 10
    assert tier.stats().writes == 0
    assert tier.stats().bytes == taken_on_disk(tmp_path)
    tier.close()


def test_f9_a_full_disk_refuses_writes_and_reads_go_on(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = open_tier(tmp_path, files=files)
    put(tier, "k", pattern("k", SIZE))
    files.fault = lambda call, _: Fault(errno.ENOSPC) if call in ("write", "fsync") else None
    assert not put(tier, "l", pattern("l", SIZE))
    assert tier.stats().failures == {"ENOSPC": 1}
    assert get(tier, "k") == pattern("k", SIZE)
    files.fault = lambda call, _: None
    assert put(tier, "l", pattern("l", SIZE))
    tier.close()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_want_of_descriptors_costs_no_entry(tmp_path: Path, error: int) -> None:
    files = FaultyFiles()
    tier = open_tier(tmp_path, files=files)
    put(tier, "k", pattern("k", SIZE))
    files.fault = lambda call, _: Fault(error) if call == "open" else None
    assert get(tier, "k") is None
    assert "k" in tier
    assert (tier.stats().read_failures, tier.stats().damaged) == (1, 0)
    files.fault = lambda call, _: None
    assert get(tier, "k") == pattern("k", SIZE)
    tier.close()


def test_a_block_that_cannot_be_read_costs_its_entry(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = open_tier(tmp_path, files=files)
    put(tier, "k", pattern("k", SIZE))
    files.fault = lambda call, _: Fault() if call == "read" else None
    assert get(tier, "k") is None
    assert "k" not in tier
    assert tier.stats().dropped == {"EIO": 1}
    assert record_paths(tmp_path) == []
    tier.close()


def test_a_file_that_cannot_be_evicted_stays_good_to_read(tmp_path: Path) -> None:
    """An undeletable file must not make the tier throw away one entry after the other."""
    files = FaultyFiles()
    tier = open_tier(tmp_path, CAPACITY, files=files)
    for key in "abc":
        put(tier, key, pattern(key, SIZE))
    files.fault = lambda call, _: Fault(errno.EROFS) if call == "unlink" else None
    for i in range(5):
        assert not put(tier, f"k{i}", pattern("k", SIZE))
    assert [get(tier, k) for k in "abc"] == [pattern(k, SIZE) for k in "abc"]
    assert tier.stats().failures == {"EROFS": 5}
    assert tier.stats().remove_failures == 5
    tier.close()


def test_a_removed_object_whose_file_cannot_go_is_gone_and_its_bytes_are_not_given_away(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = open_tier(tmp_path, files=files)
    put(tier, "k", pattern("k", SIZE))
    files.fault = lambda call, _: Fault() if call == "unlink" else None
    assert tier.remove("k")
    assert get(tier, "k") is None
    assert (tier.stats().left_behind, tier.stats().remove_failures) == (1, 1)
    assert tier.stats().bytes == taken_on_disk(tmp_path)
    files.fault = lambda call, _: None
    assert not tier.remove("other"), "any later call tries again"
    put(tier, "other", b"1")
    assert tier.stats().left_behind == 0
    assert tier.stats().bytes == taken_on_disk(tmp_path)
    assert len(record_paths(tmp_path)) == 1
    tier.close()


def test_a_new_record_in_the_place_of_a_file_that_could_not_go_is_not_removed_with_it(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = open_tier(tmp_path, files=files)
    put(tier, "k", pattern("k", SIZE))
    files.fault = lambda call, _: Fault() if call == "unlink" else None
    tier.remove("k")
    assert put(tier, "k", pattern("k", SIZE, 1))
    files.fault = lambda call, _: None
    put(tier, "other", b"1")  # tries again to remove what was left
    assert get(tier, "k") == pattern("k", SIZE, 1)
    assert tier.stats().bytes == taken_on_disk(tmp_path)
    tier.check_integrity()
    tier.close()


def test_a_file_that_cannot_go_while_it_is_read_is_counted_once(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = open_tier(tmp_path, files=files)
    put(tier, "k", pattern("k", SIZE))

    def fault(call: str, _: int) -> Fault | None:
        if call == "read":  # in the middle of the read, somebody removes it
            files.fault = lambda call, _: Fault() if call == "unlink" else None
            tier.remove("k")
        return None

    files.fault = fault
    assert get(tier, "k") == pattern("k", SIZE)
    assert tier.stats().bytes == taken_on_disk(tmp_path)
    files.fault = lambda call, _: None
    put(tier, "other", b"1")
    assert tier.stats().bytes == taken_on_disk(tmp_path)
    tier.close()


def test_every_failure_of_a_start_is_a_typed_error_or_a_start_with_right_bytes(tmp_path: Path) -> None:
    """With a whole record, a damaged one and a leftover in the folder."""
    first = FaultyFiles()
    filled(tmp_path / "count", first).close()
    with no_leaks():
        for at in range(len(first.calls)):
            for error in (errno.EIO, errno.EMFILE):
                start_with(tmp_path / f"{at}-{error}", at, error)


def start_with(folder: Path, at: int, error: int) -> None:
    """The start's call number `at` fails."""
    try:
        tier = filled(folder, FaultyFiles(lambda _, number: Fault(error) if number == at else None))
    except DiskError:
        tier = open_tier(folder)
    assert get(tier, "k") in (None, pattern("k", SIZE))
    assert set(tier.keys()) <= {"k"}
    assert tier.stats().bytes >= taken_on_disk(folder)
    assert put(tier, "l", pattern("l", SIZE))
    assert tier.stats().bytes == taken_on_disk(folder)
    tier.close()


def filled(folder: Path, files: FaultyFiles) -> DiskTier:
    """A start by way of `files` in a folder with history."""
    tier = open_tier(folder)
    put(tier, "k", pattern("k", SIZE))
    put(tier, "damaged", pattern("damaged", SIZE))
    tier.close()
    [damaged] = [p for p in record_paths(folder) if b"damaged" in p.read_bytes()]
    os.truncate(damaged, 30)
    (damaged.parent / "leftover.tmp").write_bytes(bytes(MIB))
    return open_tier(folder, files=files)
