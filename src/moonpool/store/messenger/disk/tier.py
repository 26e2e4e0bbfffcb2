"""The disk tier of a messenger: objects in files of one folder, bounded, checksummed, there again after a restart.

    write      take the bytes of a record (evicting the least recently used) → write a temporary file → fsync → rename →
               visible → fsync the folder
    read       open → read straight into the caller's memory → compare key, size and checksum

It is a cache: it may lose an object, and says so; it never returns a wrong byte, and an I/O error never raises. One lock guards the
index; files are written and read outside of it.

**Page cache, not O_DIRECT**, by measurement (`python -m benchmarks.disk`: 64 KiB, 1 MiB and 4 MiB on ext4, a virtual NVMe disk).
With fsync, writing takes as long either way (0.5, 1.3 and 1.2 GB/s): one waits for the disk. What was written or read
lately comes out of the page cache 2 to 3 times as fast (4 GB/s against 1.4 to 2.2). Only a cold read is faster with O_DIRECT (1.4 to
2.2 GB/s against 0.7 to 0.9), and it would need memory aligned as the device asks, which views into the segment are not. Dropping
pages after use (fadvise) loses the fast case and gains nothing.

**LRU over restarts** is the files' mtime: a read sets it (0.5–2 µs) if it was last set more than a minute ago.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from moonpool.clock import Clock, SystemClock
from moonpool.errors import ConfigError, DiskError, WrongSize
from moonpool.store.messenger.disk.config import DiskConfig, DiskStats
from moonpool.store.messenger.disk.counters import Counters
from moonpool.store.messenger.disk.files import Files, OsFiles, read_all, write_all
from moonpool.store.messenger.disk.folder import Folder, close_quietly
from moonpool.store.messenger.disk.holdings import Holdings
from moonpool.store.messenger.disk.index import Entry
from moonpool.store.messenger.disk.record import (
    MAX_KEY,
    Damaged,
    Header,
    checksum,
    encoded,
    header_length,
    layout_tag,
    name_of,
)
from moonpool.store.messenger.disk.scan import is_shortage, reason_of, scan

_TOUCH_S = 60.0
_CLOSE_S = 30.0
"""How long `close` waits for calls under way. A disk that hangs longer keeps the folder's lock until the process ends."""
_GOOD, _SHORT = "good", "short"
"""Outcomes of a read that keep the entry; any other is the reason to drop it."""


class DiskTier:
    """Thread-safe and synchronous: a call returns when the disk has answered. Open one with `DiskTier.open`."""

    @classmethod
    def open(cls, config: DiskConfig, *, files: Files = OsFiles(), clock: Clock = SystemClock()) -> DiskTier:
        """Own the folder, clear what a killed owner left, find again what is there.

        Raises DiskError (FolderInUse: names the owner's pid; FolderForeign: not ours, or its marker is damaged; or the system's
        own error) and ConfigError (a capacity that holds nothing, or that the file system cannot hold).
        """
        folder = Folder(os.path.abspath(config.folder), files)  # noqa: PTH100 - paths are text here
        try:
            folder.own()
            try:
                return cls(config, folder, files, clock)
            except BaseException:
                folder.close()
                raise
        except OSError as e:
            raise DiskError("cannot use the disk tier's folder", key=folder.path, have=e.strerror or str(e)) from e

    def __init__(self, config: DiskConfig, folder: Folder, files: Files, clock: Clock) -> None:
        self._config, self._folder, self._files, self._clock = config, folder, files, clock
        self._layout = layout_tag(config.layout)
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        self._busy = 0
        self._closed = False
        self._writing: dict[str, _Writing] = {}
        self._counters = Counters()
        self._holdings = Holdings(folder, files, config.capacity)
        _check_capacity(config, self._holdings)
        found = scan(folder, files, self._layout)
        self._counters.dropped += found.dropped
        self._holdings.load(found)

    def close(self) -> None:
        """Wait for calls under way, then let the next owner in. Calls after it find nothing. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._quiet.wait_for(lambda: not self._busy, timeout=_CLOSE_S):
                self._holdings.retry_left(len(self._holdings.left))
                self._folder.close()

    # -- what is there

    def keys(self) -> list[str]:
        with self._lock:
            return [] if self._closed else self._holdings.index.keys()

    def __len__(self) -> int:
        with self._lock:
            return 0 if self._closed else len(self._holdings.index)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.size(key) is not None

    def size(self, key: str) -> int | None:
        """Bytes of the object; None if it is not there."""
        name = name_of(key)
        with self._lock:
            entry = None if self._closed else self._holdings.index.get(key, name)
            return entry.size if entry else None

    def take_gone(self) -> list[str]:
        """Keys that went since the last call, for whatever reason; some may be there again."""
        with self._lock:
            index = self._holdings.index
            gone, index.gone = index.gone, []
            return gone

    def stats(self) -> DiskStats:
        with self._lock:
            return self._counters.stats(self._holdings)

    # -- write

    def write(self, key: str, view: memoryview) -> bool:
        """Store the object; True once it will survive. An older one of this key is gone either way, so that a failed write never
        leaves outdated bytes. False, counted by reason, when it failed; also when the key was removed, or written anew, meanwhile.
        """
        payload = view.cast("B")
        with self._operation() as live:
            writing = self._begin_write(key, payload.nbytes) if live else None
            if writing is None:
                return False
            writing.failure = "interrupted"
            try:
                self._fill(writing, payload)
                writing.failure = ""
            except OSError as e:
                writing.failure = reason_of(e)
            finally:
                entry = self._publish(writing)
            return entry is not None and self._settle(entry)

    def _begin_write(self, key: str, size: int) -> _Writing | None:
        """Take the record's bytes. None, counted, if there is no room."""
        name, holdings = name_of(key), self._holdings
        charge = holdings.charge(header_length(key) + size)
        writing = _Writing(key, name, size, charge, self._folder.temporary(name))
        with self._lock:
            self._cancel_write(name)
            if old := holdings.index.at(name):
                holdings.retire(old)
            reason = "too large" if len(encoded(key)) > MAX_KEY else holdings.take(charge)
            if reason:
                self._counters.failures[reason] += 1
                return None
            self._writing[name] = writing
        return writing

    def _fill(self, writing: _Writing, payload: memoryview) -> None:
        """Write the temporary file. Raises OSError."""
        header = Header(writing.key, writing.size, checksum(payload), self._layout).pack()
        fd = self._files.open(writing.temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            write_all(self._files, fd, [memoryview(header), payload])
            if self._config.fsync:
                self._files.fsync(fd)
        except BaseException:
            close_quietly(self._files, fd)
            raise
        self._files.close(fd)  # some file systems report a failed write only here

    def _publish(self, writing: _Writing) -> Entry | None:
        """Make a written file the key's record; None if it failed or is wanted no more."""
        record = self._folder.record(writing.name)
        with self._lock:
            if not writing.cancelled:
                del self._writing[writing.name]
            if not writing.failure and not writing.cancelled:
                try:
                    self._files.rename(writing.temporary, record)
                except OSError as e:
                    writing.failure = reason_of(e)
            if writing.failure or writing.cancelled:
                self._abandon(writing, record)
                return None
            entry = Entry(writing.key, writing.name, writing.size, writing.charge, self._clock.now())
            self._holdings.put(entry)
            self._counters.wrote(writing.size)
            return entry

    def _abandon(self, writing: _Writing, record: str) -> None:
        """Nothing of the write stays. A rename that failed may have happened: its goal goes too, unless another owns it."""
        if writing.failure:
            self._counters.failures[writing.failure] += 1
        taken = self._holdings.index.at(writing.name) or writing.name in self._writing
        self._holdings.discard([writing.temporary] if taken else [writing.temporary, record], writing.charge)

    def _settle(self, entry: Entry) -> bool:
        """Make the rename last; the entry goes if that fails."""
        if not self._config.fsync:
            return True
        try:
            self._folder.sync(entry.name)
        except OSError as e:
            with self._lock:
                self._counters.failures[reason_of(e)] += 1
                self._counters.wrote(entry.size, -1)
                if entry.visible:
                    self._holdings.retire(entry)
            return False
        return True

    # -- read

    def read_into(self, key: str, view: memoryview) -> bool:
        """Fill `view` with the object. False: `view` holds nothing of worth, and the object is not there, or is dropped and counted
        (damaged, truncated, vanished); only for want of descriptors or memory it stays (ask `in`).

        Raises WrongSize if `view` is not as long as the object.
        """
        out = view.cast("B")
        with self._operation() as live:
            entry = self._begin_read(key, out.nbytes) if live else None
            if entry is None:
                return False
            outcome = _SHORT
            try:
                self._load(entry, out)
                outcome = _GOOD
            except Damaged as e:
                outcome = e.reason
            except OSError as e:
                outcome = _SHORT if is_shortage(e) else reason_of(e)
            finally:
                self._end_read(entry, outcome)
            return outcome == _GOOD

    def _begin_read(self, key: str, size: int) -> Entry | None:
        name = name_of(key)
        with self._lock:
            entry = self._holdings.index.get(key, name)
            if entry is None:
                self._counters.plain["misses"] += 1
            elif entry.size != size:
                raise WrongSize("buffer and object differ in size", key=key, need=f"{entry.size} B", have=f"{size} B")
            else:
                self._holdings.index.begin_read(entry)
            return entry

    def _load(self, entry: Entry, out: memoryview) -> None:
        """Raises Damaged, OSError."""
        fd = self._files.open(self._folder.record(entry.name), os.O_RDONLY)
        try:
            head = memoryview(bytearray(header_length(entry.key)))
            if read_all(self._files, fd, [head, out]) < head.nbytes + out.nbytes:
                raise Damaged("truncated")
            header = Header.unpack(head)
            if header.key != entry.key:
                raise Damaged("other key")
            if header.layout != self._layout:
                raise Damaged("other layout")
            if header.checksum != checksum(out):
                raise Damaged("payload")
            self._touch(entry, fd)
        finally:
            close_quietly(self._files, fd)

    def _touch(self, entry: Entry, fd: int) -> None:
        now = self._clock.now()
        if now - entry.touched < _TOUCH_S:
            return
        entry.touched = now
        try:
            self._files.touch(fd)
        except OSError:
            pass  # the order after a restart is a little off

    def _end_read(self, entry: Entry, outcome: str) -> None:
        with self._lock:
            self._holdings.index.end_read(entry)
            if outcome == _GOOD:
                self._counters.read(entry.size)
            elif outcome == _SHORT:
                self._counters.plain["read_failures"] += 1
            elif entry.visible:  # else it was removed or replaced while it was read
                self._counters.dropped[outcome] += 1
                self._holdings.retire(entry)

    # -- remove

    def remove(self, key: str) -> bool:
        """True if it was there. It is gone for good, also after a restart, unless `stats().remove_failures` grew."""
        return self.remove_many([key])[0]

    def remove_many(self, keys: Sequence[str]) -> list[bool]:
        """`remove` of each, in order; a write of such a key that is under way will not appear either."""
        with self._operation() as live:
            if not live:
                return [False] * len(keys)
            with self._lock:
                names = {key: name_of(key) for key in keys}
                gone = [self._remove(key, names[key]) for key in keys]
            if self._config.fsync:
                touched = {name[0]: name for key, name in names.items()}
                self._sync_removed([touched[d] for d in sorted(touched)] if any(gone) else [])
            return gone

    def _remove(self, key: str, name: str) -> bool:
        writing = self._writing.get(name)
        if writing is not None and writing.key == key:
            self._cancel_write(name)
        entry = self._holdings.index.get(key, name)
        if entry is None:
            return False
        self._holdings.retire(entry)
        self._counters.plain["removed"] += 1
        return True

    def _sync_removed(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                self._folder.sync(name)
            except OSError:
                with self._lock:
                    self._counters.plain["sync_failures"] += 1

    # -- shared; the lock is held

    def _cancel_write(self, name: str) -> None:
        if writing := self._writing.pop(name, None):
            writing.cancelled = True

    @contextmanager
    def _operation(self) -> Iterator[bool]:
        """False inside if the tier is closed; `close` waits for the others."""
        with self._lock:
            live = not self._closed
            self._busy += live
        try:
            yield live
        finally:
            if live:
                with self._lock:
                    self._busy -= 1
                    self._quiet.notify_all()

    def check_integrity(self) -> None:
        """With nothing under way: what is taken is what the records and the files left behind take."""
        with self._lock:
            assert not self._writing
            self._holdings.check_integrity()


@dataclass(slots=True, eq=False)
class _Writing:
    """A write under way: its bytes are taken, nobody sees it."""

    key: str
    name: str
    size: int
    charge: int
    temporary: str
    cancelled: bool = False
    failure: str = ""


def _check_capacity(config: DiskConfig, holdings: Holdings) -> None:
    least, most = holdings.fixed + holdings.charge(1), holdings.space.total
    if not least <= config.capacity <= most:
        raise ConfigError(
            "the disk tier's capacity does not fit its file system",
            key=config.folder,
            need=f"{least} to {most} B",
            have=f"{config.capacity} B",
            fix="Set the disk tier's capacity.",
        )
