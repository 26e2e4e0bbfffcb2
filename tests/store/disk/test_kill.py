"""kill -9 of a process that writes, again and again, on one folder: what it was told is stored is there, whole."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.disk.support import MIB, get, open_tier, pattern, taken_on_disk, temporary_paths

ROUNDS = 20
CAPACITY = 64 * MIB
"""Room for all keys: nothing is evicted."""
NOTHING = -1

_WRITER = """
import sys
from pathlib import Path
from tests.store.disk.support import open_tier
from tests.store.disk.test_kill import CAPACITY, value
tier = open_tier(Path(sys.argv[1]), CAPACITY, fsync=sys.argv[3] == "fsync")
version = int(sys.argv[2])
while True:
    version += 1
    key = f"k{version % 37}"
    if version % 5 == 0:
        print("remove", key, version, flush=True)
        tier.remove(key)
        print("removed", key, version, flush=True)
    else:
        print("write", key, version, flush=True)
        assert tier.write(key, memoryview(value(key, version)))
        print("stored", key, version, flush=True)
"""


def value(key: str, version: int) -> bytes:
    return pattern(key, (version * 7919) % 300_000, version)


@pytest.mark.cluster
@pytest.mark.parametrize("fsync", ["fsync", "no fsync"])
def test_kill_9_of_a_writer_in_a_loop(tmp_path: Path, fsync: str) -> None:
    rng = random.Random(fsync)
    version = 0
    may_be: dict[str, set[int]] = {f"k{i}": {NOTHING} for i in range(37)}
    for _ in range(ROUNDS // 2):
        for line in run_and_kill(tmp_path, version, fsync, rng.randrange(5, 150), rng.random() * 0.004):
            did, key, number = line.split()
            version = int(number)
            match did:
                case "write":  # a replacement removes the old one first
                    may_be[key] |= {NOTHING, version}
                case "stored":
                    may_be[key] = {version}
                case "remove":
                    may_be[key] |= {NOTHING}
                case "removed":
                    may_be[key] = {NOTHING}
        verify(tmp_path, may_be)
    assert version > 100, "the writers got somewhere"


def run_and_kill(folder: Path, version: int, fsync: str, after: int, delay: float) -> list[str]:
    """What the writer said until it was killed, some time after line number `after`."""
    command = [sys.executable, "-c", _WRITER, str(folder), str(version), fsync]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(after)]
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.kill()
        lines += process.stdout.readlines()
    return [line.strip() for line in lines if line.endswith("\n")]


def verify(folder: Path, may_be: dict[str, set[int]]) -> None:
    """Each key holds what it may hold; from then on it may hold nothing else."""
    tier = open_tier(folder, CAPACITY)
    assert tier.stats().dropped == {}, "a crash damages nothing"
    assert temporary_paths(folder) == []
    assert tier.stats().bytes == taken_on_disk(folder)
    for key, versions in may_be.items():
        found = get(tier, key)
        [is_] = [v for v in versions if found == (None if v == NOTHING else value(key, v))]
        may_be[key] = {is_}
    tier.close()
