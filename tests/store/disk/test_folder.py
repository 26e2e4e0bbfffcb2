"""The folder: one owner, ours or not ours, and what a killed owner leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moonpool.errors import DiskError, FolderForeign, FolderInUse
from moonpool.testing.leaks import no_leaks
from tests.store.disk.support import MIB, get, open_tier, pattern, put, record_paths, temporary_paths

_OWNER = """
import sys, time
time.time = lambda: 1.7e9  # a frozen wall clock
time.time_ns = lambda: 1_700_000_000 * 10**9
from moonpool.errors import FolderInUse
from pathlib import Path
from tests.store.disk.support import get, open_tier, pattern, put
print("ready", flush=True)
sys.stdin.readline()
try:
    tier = open_tier(Path(sys.argv[1]))
except FolderInUse as e:
    print("refused", e, flush=True)
    sys.exit()
keys = [f"{sys.argv[2]}/{i}" for i in range(20)]
assert all(put(tier, k, pattern(k, 5000)) for k in keys)
assert all(get(tier, k) == pattern(k, 5000) for k in keys)
print("owner", flush=True)
sys.stdin.readline()
"""


def _spawn(folder: Path, number: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _OWNER, str(folder), str(number)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.cluster
def test_a13_of_eight_processes_that_start_at_once_one_owns_the_folder(tmp_path: Path) -> None:
    processes = [_spawn(tmp_path / "disk", i) for i in range(8)]
    try:
        assert [_line(p) for p in processes] == ["ready\n"] * 8
        for process in processes:
            _tell(process)
        said = [_line(p) for p in processes]
        assert said.count("owner\n") == 1
        owner = processes[said.index("owner\n")]
        refused = [s for s in said if s != "owner\n"]
        assert len(refused) == 7
        assert all(f"directory in use by pid {owner.pid}" in s for s in refused)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    tier = open_tier(tmp_path / "disk")
    number = said.index("owner\n")
    keys = [f"{number}/{i}" for i in range(20)]
    assert sorted(tier.keys()) == sorted(keys)
    assert all(get(tier, k) == pattern(k, 5000) for k in keys)
    tier.close()


def test_a_second_opener_of_the_same_process_is_refused_too(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "k", b"1")
    with no_leaks(), pytest.raises(FolderInUse, match=f"in use by pid {os.getpid()}"):
        open_tier(tmp_path)
    assert get(tier, "k") == b"1"
    tier.close()
    open_tier(tmp_path).close()


def test_a_dead_owners_pid_is_no_obstacle(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    (tmp_path / "lock").write_text("999999999")
    open_tier(tmp_path).close()
    assert (tmp_path / "lock").read_text().strip() == str(os.getpid())


def _wreck(content: bytes) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        (folder / "marker").write_bytes(content)

    return harm


def _lose(folder: Path) -> None:
    (folder / "marker").unlink()


def _add(folder: Path) -> None:
    (folder / "thesis.tex").write_text("ten years of work")


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(_wreck(b""), id="marker empty"),
        pytest.param(_wreck(b"moonpool disk tier 2\n"), id="marker of another version"),
        pytest.param(_wreck(b"moonpool disk tier 1\n\0"), id="marker with more behind"),
        pytest.param(_wreck(os.urandom(100_000)), id="marker damaged"),
        pytest.param(_lose, id="marker gone"),
        pytest.param(_add, id="something else in it"),
    ],
)
def test_d6_a_folder_that_is_not_ours_is_an_error_and_not_an_empty_tier(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    tier = open_tier(tmp_path)
    put(tier, "k", b"1")
    tier.close()
    harm(tmp_path)
    before = sorted((p, p.stat().st_size) for p in tmp_path.rglob("*") if p.name != "lock")
    with no_leaks(), pytest.raises(FolderForeign, match=r"Name another folder"):
        open_tier(tmp_path)
    after = sorted((p, p.stat().st_size) for p in tmp_path.rglob("*") if p.name != "lock")
    assert before == after, "nothing was touched"


def test_someones_home_is_left_alone(tmp_path: Path) -> None:
    _add(tmp_path)
    with pytest.raises(FolderForeign, match=r"thesis\.tex"):
        open_tier(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"], "not even a lock file was made"


def test_the_root_of_a_fresh_file_system_will_do(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    open_tier(tmp_path).close()


@pytest.mark.parametrize("stage", [{"lock"}, {"lock", "marker.tmp"}, {"lock", "marker"}])
def test_a_start_that_was_killed_half_way_is_taken_up(tmp_path: Path, stage: set[str]) -> None:
    open_tier(tmp_path / "whole").close()
    folder = tmp_path / "half"
    folder.mkdir()
    for name in stage:
        (folder / name).write_bytes((tmp_path / "whole" / name).read_bytes() if name != "marker.tmp" else b"moon")
    tier = open_tier(folder)
    assert put(tier, "k", b"1")
    tier.close()
    assert temporary_paths(folder) == []


def test_leftovers_of_a_killed_owner_go_and_strange_files_stay(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "k", b"1")
    tier.close()
    (tmp_path / "a" / "0123456789abcdef.tmp").write_bytes(bytes(MIB))
    (tmp_path / "a" / "README").write_text("not ours")
    tier = open_tier(tmp_path)
    assert temporary_paths(tmp_path) == []
    assert (tmp_path / "a" / "README").exists()
    assert tier.keys() == ["k"]
    tier.close()


def test_records_are_for_their_owner_only(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "disk")
    put(tier, "k", b"a private prompt")
    tier.close()
    assert (tmp_path / "disk").stat().st_mode & 0o077 == 0
    assert all(p.stat().st_mode & 0o077 == 0 for p in record_paths(tmp_path / "disk"))


def test_a_path_that_is_no_folder_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with no_leaks(), pytest.raises(DiskError, match="cannot use the disk tier's folder"):
        open_tier(tmp_path / "file")
