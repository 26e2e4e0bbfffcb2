"""Leak checks: what a block of code must give back. Linux only (it reads /proc).

with no_leaks(pool):
    ...            # descriptors, threads, children, shared mappings and open handles are the same before and after
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moonpool.store.base import KVPool
from moonpool.transfer.copying import THREAD_NAME


@dataclass(frozen=True)
class Resources:
    """What this process holds at one moment."""

    descriptors: Counter[str]
    """What each open descriptor points to, numbers of sockets and pipes left out."""
    threads: Counter[str]
    children: frozenset[int]
    shared_maps: int
    """Mappings of memfds and of files in /dev/shm."""
    shm_files: frozenset[str]
    handles: tuple[int, ...]
    """Open reads and reservations of each pool that was given."""

    @staticmethod
    def now(*pools: KVPool) -> Resources:
        gc.collect()
        return Resources(
            _descriptors(),
            Counter(t.name for t in threading.enumerate() if t.is_alive() and not t.name.startswith(THREAD_NAME)),
            children_of(os.getpid()),
            _shared_maps(),
            frozenset(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else frozenset(),  # noqa: PTH208, S108
            tuple(s.reads_open + s.writes_open for s in (p.stats() for p in pools)),
        )

    def leaked(self, after: Resources) -> list[str]:
        """What there is more of in `after`, in words; empty if nothing."""
        found = [f"descriptors: {dict(d)}" for d in [after.descriptors - self.descriptors] if d]
        found += [f"threads: {dict(t)}" for t in [after.threads - self.threads] if t]
        found += [f"child processes: {sorted(c)}" for c in [after.children - self.children] if c]
        if new := after.shm_files - self.shm_files:
            found += [f"files in /dev/shm: {sorted(f)}" for f in [new - _mapped_by_strangers(new)] if f]
        if after.shared_maps > self.shared_maps:
            found.append(f"shared mappings: {self.shared_maps} before, {after.shared_maps} after")
        if any(b < a for b, a in zip(self.handles, after.handles, strict=True)):
            found.append(f"open handles: {self.handles} before, {after.handles} after")
        return found


@contextmanager
def no_leaks(*pools: KVPool, grace_s: float = 3.0) -> Iterator[None]:
    """Fails (AssertionError) if the block left something behind. Threads and processes get `grace_s` to end; figures of
    `pools`, which must be open before and after, take part."""
    before = Resources.now(*pools)
    yield
    leaked: list[str] = []

    def clean() -> bool:
        leaked[:] = before.leaked(Resources.now(*pools))
        return not leaked

    if not eventually(clean, timeout_s=grace_s):
        raise AssertionError("left behind: " + "; ".join(leaked))


def eventually(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> bool:
    """Poll until `condition()` is true. False if it was not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def children_of(pid: int) -> frozenset[int]:
    """Living or unreaped child processes of `pid`."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found.update(int(c) for c in (task / "children").read_text().split())
        except OSError:
            continue  # the thread has just ended
    return frozenset(found)


def _descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - Path.iterdir holds a descriptor itself while it lists
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")  # noqa: PTH115 - a socket's target is no path
        except OSError:
            continue  # the listing's own descriptor
        if not target.startswith("/proc/"):
            found[target.split(":[")[0]] += 1
    return found


def _shared_maps() -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("/memfd:moonpool" in line or " /dev/shm/" in line for line in lines)


def _mapped_by_strangers(names: frozenset[str]) -> frozenset[str]:
    """Those of these files in /dev/shm that a process which is neither this one nor its child has mapped: they are its own."""
    ours = {os.getpid(), *children_of(os.getpid())}
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) in ours:
            continue
        try:
            mapped = (process / "maps").read_text()
        except OSError:
            continue  # it has just ended, or is another user's
        found.update(n for n in names if f" /dev/shm/{n}\n" in mapped)
    return frozenset(found)
