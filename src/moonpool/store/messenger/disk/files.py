"""The few calls by which the disk tier touches the disk: one small interface, so that tests can make each of them fail."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Status(NamedTuple):
    size: int
    mtime_ns: int


class Space(NamedTuple):
    block: int
    """Bytes; a file takes whole blocks."""
    total: int
    """Bytes of the whole file system."""


class Files(Protocol):
    """Every method may raise OSError. `read` and `write` may do less than they were asked to, like the system's calls."""

    def open(self, path: str, flags: int) -> int: ...
    def close(self, fd: int) -> None: ...
    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...
    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...
    def fsync(self, fd: int) -> None: ...
    def truncate(self, fd: int) -> None: ...
    def lock(self, fd: int) -> bool: ...
    def touch(self, fd: int) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def unlink(self, path: str) -> None: ...
    def status(self, path: str) -> Status: ...
    def listing(self, folder: str) -> list[str]: ...
    def make_folder(self, path: str) -> None: ...
    def space(self, path: str) -> Space: ...


class OsFiles:
    """The real calls. What is made is for its owner only: cached prompts are private."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def truncate(self, fd: int) -> None:
        os.ftruncate(fd, 0)

    def lock(self, fd: int) -> bool:
        """Take the file's lock, which ends with the descriptor; False if somebody else has it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def touch(self, fd: int) -> None:
        os.utime(fd)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)  # noqa: PTH104 - the interface speaks of paths as text

    def unlink(self, path: str) -> None:
        os.unlink(path)  # noqa: PTH108

    def status(self, path: str) -> Status:
        found = os.lstat(path)
        return Status(found.st_size, found.st_mtime_ns)

    def listing(self, folder: str) -> list[str]:
        return os.listdir(folder)  # noqa: PTH208

    def make_folder(self, path: str) -> None:
        os.makedirs(path, mode=0o700, exist_ok=True)  # noqa: PTH103

    def space(self, path: str) -> Space:
        found = os.statvfs(path)
        return Space(found.f_frsize, found.f_frsize * found.f_blocks)


def write_all(files: Files, fd: int, buffers: Sequence[memoryview]) -> None:
    """Write all bytes from the file's start on, in as many calls as it takes (one moves 2 GiB at most)."""
    if _move(lambda rest, at: files.write(fd, rest, at), buffers) < sum(b.nbytes for b in buffers):
        raise OSError(errno.EIO, "the system writes nothing and says nothing")


def read_all(files: Files, fd: int, buffers: Sequence[memoryview], offset: int = 0) -> int:
    """Fill the buffers from `offset` on. Returns how many bytes there were: fewer than asked for at the end of the file."""
    return _move(lambda rest, at: files.read(fd, rest, offset + at), buffers)


def _move(step: _Step, buffers: Sequence[memoryview]) -> int:
    done, total = 0, sum(b.nbytes for b in buffers)
    while done < total:
        moved = step(_after(buffers, done), done)
        if not moved:
            break
        done += moved
    return done


class _Step(Protocol):
    def __call__(self, rest: list[memoryview], at: int, /) -> int: ...


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers after `done` bytes."""
    rest = []
    for buffer in buffers:
        if done < buffer.nbytes:
            rest.append(buffer[done:])
        done = max(0, done - buffer.nbytes)
    return rest
