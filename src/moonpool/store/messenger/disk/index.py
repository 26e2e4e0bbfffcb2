"""What lies in the folder, in LRU order, and how much of the capacity is taken. Pure; the caller locks.

Keyed by file name, so that two keys that met in one file could never both be there. Bytes are taken before anything is written
and given back after it is unlinked; an entry that is being read keeps its bytes, for the open file does so too.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Entry:
    key: str
    name: str
    size: int
    charge: int
    touched: float
    """When its time stamp on disk was last set."""
    readers: int = 0
    visible: bool = False


class Index:
    def __init__(self, capacity: int, fixed: int) -> None:
        self.capacity = capacity
        self.used = fixed
        self._entries: dict[str, Entry] = {}
        self._idle: OrderedDict[str, Entry] = OrderedDict()
        """Those that nobody reads, least recently used first."""
        self._evictable = 0
        self.gone: list[str] = []
        """Keys of entries that were made invisible, until somebody takes the list."""

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self) -> list[str]:
        return [e.key for e in self._entries.values()]

    def at(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def get(self, key: str, name: str) -> Entry | None:
        entry = self._entries.get(name)
        return entry if entry is not None and entry.key == key else None

    def fits(self, charge: int) -> bool:
        return self.used + charge <= self.capacity

    def could_fit(self, charge: int) -> bool:
        """Whether evicting all that nobody reads would make room."""
        return self.used - self._evictable + charge <= self.capacity

    def take(self, charge: int) -> None:
        self.used += charge

    def give(self, charge: int) -> None:
        self.used -= charge
        assert self.used >= 0

    def add(self, entry: Entry) -> None:
        """Make visible, as the most recently used; its charge was taken before."""
        assert entry.name not in self._entries
        entry.visible = True
        self._entries[entry.name] = entry
        self._rest(entry)

    def remove(self, entry: Entry) -> None:
        """Make invisible; its charge stays taken."""
        del self._entries[entry.name]
        self._wake(entry)
        entry.visible = False
        self.gone.append(entry.key)

    def begin_read(self, entry: Entry) -> None:
        entry.readers += 1
        self._wake(entry)

    def touch(self, entry: Entry) -> None:
        """Now the most recently used."""
        self._idle.move_to_end(entry.name)

    def end_read(self, entry: Entry) -> None:
        entry.readers -= 1
        if entry.readers:
            return
        if entry.visible:
            self._rest(entry)
        else:
            self.give(entry.charge)

    def victim(self) -> Entry | None:
        """What to evict next; None if everything is being read."""
        return next(iter(self._idle.values()), None)

    def _rest(self, entry: Entry) -> None:
        self._idle[entry.name] = entry
        self._evictable += entry.charge

    def _wake(self, entry: Entry) -> None:
        if self._idle.pop(entry.name, None):
            self._evictable -= entry.charge

    def check_integrity(self, fixed: int) -> None:
        """With nothing under way: what is taken is `fixed` and the sum of the entries."""
        assert self._idle.keys() == {n for n, e in self._entries.items() if not e.readers}
        assert all(e.visible and e.name == n for n, e in self._entries.items())
        assert self._evictable == sum(e.charge for e in self._idle.values())
        assert self.used == fixed + sum(e.charge for e in self._entries.values())
        assert self.used <= self.capacity
