"""The folder: one owner, a marker that says that it is ours, and where which file lies.

lock          flock'ed by its owner, whose pid it holds
marker        says that this is a folder of ours, and how it is laid out
0/ … f/       records, by the first digit of their names; temporary files lie beside the record that they become
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from moonpool.errors import FolderForeign, FolderInUse
from moonpool.store.messenger.disk.files import Files, read_all, write_all

MARKER = b"moonpool disk tier 1\n"
_DIGITS = "0123456789abcdef"
_TEMP = ".tmp"
_NOT_OURS_BUT_FINE = {"lost+found"}
"""What a fresh file system holds at its root."""
_PID_WAIT_S = 0.5


class Folder:
    """Owned from `own` until `close`."""

    def __init__(self, path: str, files: Files) -> None:
        self.path, self._files = path, files
        self._lock_fd = -1

    @property
    def fixed_files(self) -> int:
        """Files and folders that are there whatever is stored; each takes a block."""
        return len(_DIGITS) + 3

    def own(self) -> None:
        """Make the folder if it is missing, and become its owner.

        Raises FolderInUse, FolderForeign (something else lies in it, or its marker is damaged), OSError.
        """
        self._files.make_folder(self.path)
        there = set(self._files.listing(self.path))
        if strange := there - {"lock", "marker", f"marker{_TEMP}", *_DIGITS} - _NOT_OURS_BUT_FINE:
            raise self._foreign("other things lie in the folder", sorted(strange)[0])
        self._lock_fd = self._acquire()
        try:
            self._mark()
            for digit in _DIGITS:
                self._files.make_folder(f"{self.path}/{digit}")
            self._sync(self.path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let the next owner in. Idempotent."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            close_quietly(self._files, fd)

    def record(self, name: str) -> str:
        return f"{self.path}/{name[0]}/{name}"

    def temporary(self, name: str) -> str:
        """A path that was never used before, in the folder of the record `name`."""
        return f"{self.path}/{name[0]}/{os.urandom(8).hex()}{_TEMP}"

    def sync(self, name: str) -> None:
        """Make what was renamed or unlinked beside the record `name` last. Raises OSError."""
        self._sync(f"{self.path}/{name[0]}")

    def listing(self) -> Iterator[tuple[str, str]]:
        """(path, name) of everything in the record folders. Raises OSError: half a listing would look like an empty folder."""
        for digit in _DIGITS:
            for name in self._files.listing(f"{self.path}/{digit}"):
                yield f"{self.path}/{digit}/{name}", name

    @staticmethod
    def is_temporary(name: str) -> bool:
        return name.endswith(_TEMP)

    @staticmethod
    def is_record(name: str) -> bool:
        return len(name) == 32 and set(name) <= set(_DIGITS)

    def _acquire(self) -> int:
        fd = self._files.open(f"{self.path}/lock", os.O_RDWR | os.O_CREAT)
        try:
            if not self._files.lock(fd):
                raise FolderInUse(
                    f"directory in use by pid {self._owner(fd)}",
                    key=self.path,
                    fix="Give every messenger a folder of its own, or stop the other one.",
                )
            # As wide as any pid: it overwrites the last owner's without taking space, which a full disk would not give.
            write_all(self._files, fd, [memoryview(f"{os.getpid():<20}\n".encode())])
        except BaseException:
            close_quietly(self._files, fd)
            raise
        return fd

    def _owner(self, fd: int) -> str:
        """The pid in the lock file. A new owner writes it just after it got the lock: until then there is none, or a dead one's."""
        deadline = time.monotonic() + _PID_WAIT_S
        while True:
            raw = bytearray(32)
            pid = raw[: read_all(self._files, fd, [memoryview(raw)])].decode("ascii", "replace").strip()
            if (pid.isdecimal() and _alive(int(pid))) or time.monotonic() > deadline:
                return pid or "unknown"
            time.sleep(0.01)

    def _mark(self) -> None:
        marker = f"{self.path}/marker"
        there = self._files.listing(self.path)
        if "marker" in there:
            if (have := self._read(marker)) != MARKER:
                raise self._foreign("the folder's marker is damaged or another version's", repr(have[:40]))
        elif set(there) & set(_DIGITS):
            raise self._foreign("the folder's marker is gone", "records without a marker")
        else:
            self._write(f"{marker}{_TEMP}", MARKER)
            self._files.rename(f"{marker}{_TEMP}", marker)
            self._sync(self.path)

    def _foreign(self, what: str, have: str) -> FolderForeign:
        fix = "Name another folder, or remove this one with all that is in it."
        return FolderForeign(what, key=self.path, need="an empty folder or one of a disk tier", have=have, fix=fix)

    def _read(self, path: str) -> bytes:
        fd = self._files.open(path, os.O_RDONLY)
        try:
            raw = bytearray(2 * len(MARKER))
            return bytes(raw[: read_all(self._files, fd, [memoryview(raw)])])
        finally:
            close_quietly(self._files, fd)

    def _write(self, path: str, content: bytes) -> None:
        fd = self._files.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(self._files, fd, [memoryview(content)])
            self._files.fsync(fd)
        finally:
            close_quietly(self._files, fd)

    def _sync(self, path: str) -> None:
        fd = self._files.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._files.fsync(fd)
        finally:
            close_quietly(self._files, fd)


def close_quietly(files: Files, fd: int) -> None:
    """Close what was only read, or is of no use any more: the descriptor is gone whatever the system answers."""
    try:
        files.close(fd)
    except OSError:
        pass  # nothing of worth hangs on it


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass  # somebody else's, or no pid: do not wait for a better one
    return True
