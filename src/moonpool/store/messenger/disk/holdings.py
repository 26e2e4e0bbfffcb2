"""The files that there are and the bytes that they take: `Index` with its consequences on disk. The caller locks.

A file that cannot be unlinked is *left*: nobody sees it, its bytes stay taken, and removing it is tried again, a few at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from moonpool.store.messenger.disk.files import Files
from moonpool.store.messenger.disk.folder import Folder
from moonpool.store.messenger.disk.index import Entry, Index
from moonpool.store.messenger.disk.record import name_of
from moonpool.store.messenger.disk.scan import Scan, reason_of

_FOLDER_ENTRY = 256
"""Bytes of its folder that a file may take: name, inode number, and room that a split leaves empty."""
_RETRIES = 8


class Holdings:
    def __init__(self, folder: Folder, files: Files, capacity: int) -> None:
        self._folder, self._files = folder, files
        self.space = files.space(folder.path)
        self.fixed = folder.fixed_files * self.space.block
        self.index = Index(capacity, self.fixed)
        self.left: dict[str, int] = {}
        """Path → bytes."""
        self.evicted = 0
        self.failures = 0
        """Times that unlinking failed."""

    def charge(self, size: int) -> int:
        """Bytes that a file of `size` bytes takes: whole blocks, and its place in the folder."""
        block = self.space.block
        return -(-size // block) * block + _FOLDER_ENTRY

    def load(self, scan: Scan) -> None:
        """Take over what a scan found, and evict what is too much because the capacity was made smaller."""
        for path, size in scan.left.items():
            self.left[path] = self.charge(size)
            self.index.take(self.left[path])
        for header, status in scan.found:
            charge = self.charge(status.size)
            self.index.take(charge)
            self.index.add(Entry(header.key, name_of(header.key), header.size, charge, touched=float("-inf")))
        while not self.index.fits(0) and (victim := self.index.victim()):
            self.retire(victim)
            self.evicted += 1

    def take(self, charge: int) -> str:
        """Take `charge` bytes, evicting what it needs; nothing is evicted if that could not do. Returns why it failed, or ""."""
        self.retry_left(_RETRIES)
        if self.fixed + charge > self.index.capacity:
            return "too large"
        if not self.index.could_fit(charge):
            return "no room"
        while not self.index.fits(charge):
            if reason := self._evict():
                return reason
        self.index.take(charge)
        return ""

    def _evict(self) -> str:
        victim = self.index.victim()
        assert victim is not None, "could_fit said so"
        try:
            self._files.unlink(self._folder.record(victim.name))
        except FileNotFoundError:
            pass  # its bytes are free all the same
        except OSError as e:
            self.failures += 1
            self.index.touch(victim)  # still good to read; another one is tried next time
            return reason_of(e)
        self.index.remove(victim)
        self.index.give(victim.charge)
        self.evicted += 1
        return ""

    def put(self, entry: Entry) -> None:
        """A record whose bytes were taken is in its place now, also in that of one that was left."""
        self.index.give(self.left.pop(self._folder.record(entry.name), 0))
        self.index.add(entry)

    def retire(self, entry: Entry) -> None:
        """Make invisible and unlink."""
        self.index.remove(entry)
        if not self._unlink(self._folder.record(entry.name), entry.charge):
            entry.charge = 0  # the file that is left has them
        elif not entry.readers:  # else the last reader gives them back
            self.index.give(entry.charge)

    def discard(self, paths: Sequence[str], charge: int) -> None:
        """Unlink a file that lies at one of these paths, and give its bytes back."""
        for path in paths:
            if not self._unlink(path, charge):
                charge = 0
        self.index.give(charge)

    def retry_left(self, most: int) -> None:
        for path in list(islice(self.left, most)):
            charge = self.left.pop(path)  # one that fails again goes to the end of the line
            if self._unlink(path, charge):
                self.index.give(charge)

    def _unlink(self, path: str, charge: int) -> bool:
        """True: the file is gone. False: it is left, with `charge` bytes."""
        try:
            self._files.unlink(path)
        except FileNotFoundError:
            pass  # that is what was wanted
        except OSError:
            self.failures += 1
            self.left[path] = self.left.get(path, 0) + charge
            return False
        self.index.give(self.left.pop(path, 0))
        return True

    def check_integrity(self) -> None:
        """With nothing under way: what is taken is what the records and the files that were left take."""
        self.index.check_integrity(self.fixed + sum(self.left.values()))
