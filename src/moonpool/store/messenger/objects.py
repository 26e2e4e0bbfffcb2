"""The table of visible objects, in LRU order, with native pages and their converted siblings tied together. Pure.

Eviction takes the least recently used object that nobody reads. A batch is touched from its last key to its first, so that of
one prefix the deeper pages go first: a prefix without its head is worth nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.keys import PageKey


@dataclass(slots=True, eq=False)
class Object:
    key: str
    offset: int
    size: int
    page: PageKey | None
    readers: int = 0
    visible: bool = False


class ObjectTable:
    def __init__(self) -> None:
        self._objects: dict[str, Object] = {}
        self._idle: OrderedDict[str, Object] = OrderedDict()
        """Those that nobody reads, least recently used first: finding a victim takes the same time however many there are."""
        self._siblings: dict[str, set[str]] = {}
        self.converted = 0

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, key: str) -> bool:
        return key in self._objects

    def get(self, key: str) -> Object | None:
        return self._objects.get(key)

    def keys(self) -> list[str]:
        return list(self._objects)

    def add(self, obj: Object) -> None:
        assert obj.key not in self._objects
        obj.visible = True
        self._objects[obj.key] = self._idle[obj.key] = obj
        if obj.page and obj.page.origin:
            self._siblings.setdefault(obj.page.native.text, set()).add(obj.key)
            self.converted += 1

    def remove(self, obj: Object) -> None:
        """Make invisible. The space is still the object's while `readers > 0`."""
        del self._objects[obj.key]
        self._idle.pop(obj.key, None)
        obj.visible = False
        if obj.page and obj.page.origin:
            native = obj.page.native.text
            self._siblings[native].discard(obj.key)
            if not self._siblings[native]:
                del self._siblings[native]
            self.converted -= 1

    def touch(self, keys: Sequence[str]) -> None:
        for key in reversed(keys):
            if key in self._idle:
                self._idle.move_to_end(key)

    def begin_read(self, opened: Sequence[Object]) -> None:
        """Count one more reader of each; what is read cannot be a victim."""
        for obj in opened:
            obj.readers += 1
            self._idle.pop(obj.key, None)

    def end_read(self, opened: Sequence[Object]) -> list[Object]:
        """Count one reader less; those without any are the most recently used now. Returns removed objects that nobody reads any
        more: their space is free."""
        gone = []
        for obj in reversed(opened):
            obj.readers -= 1
            if not obj.readers and obj.visible:
                self._idle[obj.key] = obj
            elif not obj.readers:
                gone.append(obj)
        return gone

    def converted_of(self, native: str) -> list[Object]:
        """Converted pages of this native key."""
        return [self._objects[k] for k in self._siblings.get(native, ())]

    def best(self, native: str, origins: Sequence[str]) -> str | None:
        """The key that serves a native page: itself, or the first of `origins` that is there."""
        if native in self._objects:
            return native
        if native not in self._siblings:
            return None
        candidates = (f"{native}~x2x:{o}" for o in origins)
        return next((c for c in candidates if c in self._objects), None)

    def victim(self) -> Object | None:
        """What to evict next; None if everything is being read."""
        return next(iter(self._idle.values()), None)

    def check_integrity(self) -> None:
        assert self._idle.keys() == {k for k, o in self._objects.items() if not o.readers}
        converted = {k: o.page.native.text for k, o in self._objects.items() if o.page and o.page.origin}
        assert {(k, n) for n, ks in self._siblings.items() for k in ks} == set(converted.items())
        assert self.converted == len(converted)
        assert all(o.visible for o in self._objects.values())
