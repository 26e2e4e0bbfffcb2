"""What the disk tier's tests share: bytes that depend on the key, a disk that fails on demand, a model, a look at the folder."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from moonpool.clock import Clock, SystemClock
from moonpool.store.messenger.disk import DiskConfig, DiskTier, Files, OsFiles
from moonpool.store.messenger.disk.files import Space, Status

T = TypeVar("T")
KIB, MIB = 1 << 10, 1 << 20


def pattern(key: str, size: int, version: int = 0) -> bytes:
    return random.Random(f"{key}/{version}").randbytes(size)


def open_tier(
    folder: Path,
    capacity: int = 4 * MIB,
    *,
    files: Files = OsFiles(),
    clock: Clock = SystemClock(),
    fsync: bool = False,
    layout: str = "",
) -> DiskTier:
    """Without fsync, unless the test is about it: hundreds of tests would wait for the disk."""
    config = DiskConfig(folder=str(folder), capacity=capacity, fsync=fsync, layout=layout)
    return DiskTier.open(config, files=files, clock=clock)


def put(tier: DiskTier, key: str, value: bytes) -> bool:
    return tier.write(key, memoryview(value))


def get(tier: DiskTier, key: str) -> bytes | None:
    """The object's bytes, None if it is not there; what the tier calls a success is returned as it is."""
    size = tier.size(key)
    if size is None:
        return None
    out = bytearray(b"\xee" * size)
    return bytes(out) if tier.read_into(key, memoryview(out)) else None


def record_paths(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("?/*") if len(p.name) == 32)


def temporary_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("**/*.tmp"))


def path_of(folder: Path, key: str) -> Path:
    """Where the record of `key` lies, found by its bytes."""
    [found] = [p for p in record_paths(folder) if _key_of(p.read_bytes()) == key.encode()]
    return found


def _key_of(raw: bytes) -> bytes:
    return raw[64 : 64 + int.from_bytes(raw[12:16], "little")]


def taken_on_disk(folder: Path) -> int:
    """What `stats().bytes` must say: 19 files and folders that are always there; and each file's whole blocks and 256 B."""
    block = os.statvfs(folder).f_frsize
    sizes = [p.stat().st_size for p in folder.glob("?/*")]
    return 19 * block + sum(-(-size // block) * block + 256 for size in sizes)


class Model:
    """A tier next to a dict of what it may hold: a key may be lost, but never hold anything else."""

    def __init__(self, tier: DiskTier) -> None:
        self.tier = tier
        self.may_hold: dict[str, bytes] = {}

    def write(self, key: str, value: bytes) -> bool:
        stored = put(self.tier, key, value)
        self.may_hold.pop(key, None)
        if stored:
            self.may_hold[key] = value
        return stored

    def read(self, key: str) -> bytes | None:
        value = get(self.tier, key)
        assert value is None or value == self.may_hold[key], f"wrong bytes of {key}"
        return value

    def remove(self, keys: Sequence[str]) -> None:
        there = [key in self.tier for key in keys]
        assert self.tier.remove_many(keys) == [
            t and k not in keys[:i] for i, (k, t) in enumerate(zip(keys, there, strict=True))
        ]
        for key in keys:
            self.may_hold.pop(key, None)

    def check(self) -> None:
        assert set(self.tier.keys()) <= set(self.may_hold)
        for key in self.may_hold:
            self.read(key)


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


class FaultyFiles(OsFiles):
    """The real calls, but `fault` may make one of them fail, and fsync, which only a power cut would show, does nothing.

    `calls` lists what was called, folders' opens and fsyncs told apart from files'. `fault(call, number)` is asked before the call
    with that number and answers None or a `Fault`.
    """

    def __init__(self, fault: Callable[[str, int], Fault | None] = lambda call, number: None) -> None:
        self.fault = fault
        self.calls: list[str] = []
        self._folders: set[int] = set()

    def _do(self, call: str, action: Callable[[], T], part: Callable[[int], T] | None = None) -> T:
        self.calls.append(call)
        fault = self.fault(call, len(self.calls) - 1)
        if fault is None:
            return action()
        if fault.bytes is not None and part is not None and not fault.spent:
            fault.spent = True
            return part(fault.bytes)  # short, like the system: the error comes with the next call
        if fault.happens:
            done = action()
            if call.startswith("open"):
                os.close(done)  # type: ignore[arg-type]  # nobody is told of the descriptor
        raise OSError(fault.error, os.strerror(fault.error))

    def open(self, path: str, flags: int) -> int:
        folder = bool(flags & os.O_DIRECTORY)
        fd = self._do("open folder" if folder else "open", lambda: super(FaultyFiles, self).open(path, flags))
        (self._folders.add if folder else self._folders.discard)(fd)
        return fd

    def close(self, fd: int) -> None:
        try:
            self._do("close", lambda: None)
        finally:
            super().close(fd)  # the descriptor is gone whatever close says

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._do(
            "write",
            lambda: super(FaultyFiles, self).write(fd, buffers, offset),
            lambda n: super(FaultyFiles, self).write(fd, _first(buffers, n), offset),
        )

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._do(
            "read",
            lambda: super(FaultyFiles, self).read(fd, buffers, offset),
            lambda n: super(FaultyFiles, self).read(fd, _first(buffers, n), offset),
        )

    def fsync(self, fd: int) -> None:
        self._do("fsync folder" if fd in self._folders else "fsync", lambda: None)

    def lock(self, fd: int) -> bool:
        return self._do("lock", lambda: super(FaultyFiles, self).lock(fd))

    def touch(self, fd: int) -> None:
        self._do("touch", lambda: super(FaultyFiles, self).touch(fd))

    def rename(self, old: str, new: str) -> None:
        self._do("rename", lambda: super(FaultyFiles, self).rename(old, new))

    def unlink(self, path: str) -> None:
        self._do("unlink", lambda: super(FaultyFiles, self).unlink(path))

    def status(self, path: str) -> Status:
        return self._do("status", lambda: super(FaultyFiles, self).status(path))

    def listing(self, folder: str) -> list[str]:
        return self._do("listing", lambda: super(FaultyFiles, self).listing(folder))

    def make_folder(self, path: str) -> None:
        self._do("make_folder", lambda: super(FaultyFiles, self).make_folder(path))

    def space(self, path: str) -> Space:
        return self._do("space", lambda: super(FaultyFiles, self).space(path))


class Fault:
    """`bytes`: how many still go through. `happens`: the call does its work and reports an error all the same."""

    def __init__(self, error: int = errno.EIO, *, bytes: int | None = None, happens: bool = False) -> None:
        self.error, self.bytes, self.happens = error, bytes, happens
        self.spent = False


def _first(buffers: Sequence[memoryview], size: int) -> list[memoryview]:
    kept = []
    for buffer in buffers:
        kept.append(buffer[:size])
        size -= kept[-1].nbytes
    return kept
