"""The table of visible objects, in LRU order, with native pages and their converted siblings tied together. Pure.

Eviction takes the least recently used object that nobody reads. A batch is touched from its last key to its first, so that of
one prefix the deeper pages go first: a prefix without its head is worth nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
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
        self._objects: OrderedDict[str, Object] = OrderedDict()
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
        self._objects[obj.key] = obj
        if obj.page and obj.page.origin:
            self._siblings.setdefault(obj.page.native.text, set()).add(obj.key)
            self.converted += 1

    def remove(self, obj: Object) -> None:
        """Make invisible. The space is still the object's while `readers > 0`."""
        del self._objects[obj.key]
        obj.visible = False
        if obj.page and obj.page.origin:
            native = obj.page.native.text
            self._siblings[native].discard(obj.key)
            if not self._siblings[native]:
                del self._siblings[native]
            self.converted -= 1

    def touch(self, keys: Sequence[str]) -> None:
        for key in reversed(keys):
            if key in self._objects:
                self._objects.move_to_end(key)

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

    def victims(self) -> Iterator[Object]:
        """What may be evicted, least recently used first. The table may be changed between two items."""
        for key in list(self._objects):
            obj = self._objects.get(key)
            if obj and not obj.readers:
                yield obj
