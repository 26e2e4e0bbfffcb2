"""The disk tier, and what the disk could do at best: `python -m benchmarks.disk [FOLDER]`.

First the three ways to the disk, bare (one file an object, os.pwritev and os.preadv, nothing else), by which the tier chose:

    buffered       through the page cache
    dropped        through the page cache, and out of it at once (fadvise DONTNEED)
    direct         O_DIRECT, aligned buffers

Then the tier itself, each figure next to the bare buffered one of the same file and the same run:

    <call>_<size>_mb_s       10⁶ bytes a second, median of the objects
    <call>_<size>_fraction   bytes/s of the tier ÷ bytes/s of the bare calls: open, one pwritev or preadv, (fsync,) close

`cold` means that the file's pages were dropped before (an O_DIRECT device may have a cache of its own); `warm` that it was read just
before. The tier's write with fsync also syncs the folder: two commits of the file system's journal where the bare one has one.

`restart_10k_s`: opening a folder of 10 000 objects of 4 KiB.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import figures
from moonpool.store.messenger.disk import DiskConfig, DiskTier

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64k": (64 * KIB, 200), "1m": (MIB, 80), "4m": (4 * MIB, 40)}
"""Bytes of an object, and how many."""
WAYS = ("buffered", "dropped", "direct")
CALLS = ("write", "write_fsync", "read_cold", "read_warm")
RESTART_OBJECTS = 10_000


def main(folder: Path) -> None:
    found: dict[str, float] = {}
    for name, (size, count) in SIZES.items():
        with scratch(folder) as place:
            bare = {way: measure_bare(place, way, size, count) for way in WAYS}
        with scratch(folder) as place:
            ours = measure_tier(place, size, count)
        for call in CALLS:
            found |= {f"bare_{way}_{call}_{name}_mb_s": bare[way][call] for way in WAYS}
            found[f"{call}_{name}_mb_s"] = ours[call]
            found[f"{call}_{name}_fraction"] = ours[call] / bare["buffered"][call]
        rows = [
            (c, *(f"{bare[w][c]:.0f}" for w in WAYS), f"{ours[c]:.0f}", f"{found[f'{c}_{name}_fraction']:.2f}")
            for c in CALLS
        ]
        figures.show(f"objects of {size // KIB} KiB, MB/s", rows, ("call", *WAYS, "tier", "tier ÷ buffered"))
    with scratch(folder) as place:
        found |= measure_restart(place)
    print(
        f"restart with {RESTART_OBJECTS} objects: {found['restart_10k_s']:.2f} s, cold {found['restart_10k_cold_s']:.2f} s"
    )
    print(figures.write("disk", found))


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="bench-disk-", dir=folder))
    try:
        yield place
    finally:
        shutil.rmtree(place)


def aligned(size: int) -> memoryview:
    """Memory that O_DIRECT takes."""
    return memoryview(mmap.mmap(-1, size))


def speed(size: int, items: Sequence[str], action: Callable[[str], object]) -> float:
    """MB/s of the median item."""
    times = []
    for item in items:
        start = time.perf_counter()
        action(item)
        times.append(time.perf_counter() - start)
    return size / statistics.median(times) / 1e6


def measure_bare(place: Path, way: str, size: int, count: int) -> dict[str, float]:
    value, out = aligned(size), aligned(size)
    value[:] = os.urandom(size)
    out[:] = bytes(size)  # touched
    direct = os.O_DIRECT if way == "direct" else 0
    paths = [str(place / f"{way}{i}") for i in range(count)]

    def write(path: str, *, fsync: bool) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | direct, 0o600)
        assert os.pwritev(fd, [value], 0) == size
        if fsync:
            os.fsync(fd)
        finish(fd)

    def read(path: str) -> None:
        fd = os.open(path, os.O_RDONLY | direct)
        assert os.preadv(fd, [out], 0) == size
        finish(fd)

    def finish(fd: int) -> None:
        if way == "dropped":
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

    found = {"write": speed(size, paths, lambda p: write(p, fsync=False))}
    settle(place, remove=True)
    found["write_fsync"] = speed(size, paths, lambda p: write(p, fsync=True))
    settle(place)
    found["read_cold"] = speed(size, paths, read)
    found["read_warm"] = speed(size, paths, read)
    assert out == value
    settle(place, remove=True)
    return found


def measure_tier(place: Path, size: int, count: int) -> dict[str, float]:
    value, out = aligned(size), aligned(size)
    value[:] = os.urandom(size)
    out[:] = bytes(size)
    keys = [f"page-{i}" for i in range(count)]
    found: dict[str, float] = {}
    for call, fsync in (("write", False), ("write_fsync", True)):
        tier = open_tier(place / call, fsync=fsync)
        found[call] = speed(size, keys, lambda key, tier=tier: store(tier, key, value))  # type: ignore[misc]
        settle(place)
        if fsync:
            found["read_cold"] = speed(size, keys, lambda key, tier=tier: load(tier, key, out))  # type: ignore[misc]
            found["read_warm"] = speed(size, keys, lambda key, tier=tier: load(tier, key, out))  # type: ignore[misc]
        tier.close()
    assert out == value
    return found


def open_tier(folder: Path, *, fsync: bool) -> DiskTier:
    return DiskTier.open(DiskConfig(folder=str(folder), capacity=1 << 30, fsync=fsync))


def store(tier: DiskTier, key: str, value: memoryview) -> None:
    assert tier.write(key, value), tier.stats()


def load(tier: DiskTier, key: str, out: memoryview) -> None:
    assert tier.read_into(key, out), tier.stats()


def measure_restart(place: Path) -> dict[str, float]:
    tier = open_tier(place / "tier", fsync=False)
    value = memoryview(bytes(4 * KIB))
    for i in range(RESTART_OBJECTS):
        store(tier, f"page-{i}", value)
    tier.close()
    found = {}
    for name in ("restart_10k_cold_s", "restart_10k_s"):
        if "cold" in name:
            settle(place)
        start = time.perf_counter()
        tier = open_tier(place / "tier", fsync=False)
        found[name] = time.perf_counter() - start
        assert len(tier) == RESTART_OBJECTS
        tier.close()
    return found


def settle(place: Path, *, remove: bool = False) -> None:
    """Nothing of these files is in the page cache, or waits to be written."""
    for path in (p for p in place.rglob("*") if p.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        if remove:
            path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()))
