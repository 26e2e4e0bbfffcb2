"""The table of visible objects, in LRU order, with native pages and their converted siblings tied together. Pure.

Eviction takes the least recently used object that nobody reads; soft-pinned ones only when no other is left, hard-pinned ones
never. A batch is touched from its last key to its first, so that of one prefix the deeper pages go first: a prefix without its
head is worth nothing. A group is touched, and evicted, as a whole.

Keys are full keys: the tenant's prefix included (`tenants.py`).
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from moonpool.types import Pin

CONVERTED = "~x2x:"


@dataclass(slots=True, eq=False)
class Object:
    key: str
    offset: int
    size: int
    owner: str = ""
    """`KVIdentity` digest of a page; empty for any other object."""
    tenant: str = ""
    pin: Pin = Pin.NONE
    pinned_until: float = 0.0
    """Of a soft pin."""
    group: str = ""
    readers: int = 0
    visible: bool = False
    converted: bool = False
    """An approximation of `native`, by a projector."""

    @property
    def native(self) -> str:
        """Key of the native page that this one approximates, or is."""
        return self.key.partition(CONVERTED)[0]


@dataclass(slots=True)
class Idle:
    """What may be evicted, least recently used first: finding a victim takes the same time however many there are."""

    normal: OrderedDict[str, Object] = field(default_factory=OrderedDict)
    soft: OrderedDict[str, Object] = field(default_factory=OrderedDict)
    nbytes: int = 0

    def add(self, obj: Object, *, first: bool = False) -> None:
        if obj.pin is not Pin.HARD:
            kind = self.soft if obj.pin is Pin.SOFT else self.normal
            kind[obj.key] = obj
            self.nbytes += obj.size
            if first:
                kind.move_to_end(obj.key, last=False)

    def drop(self, key: str) -> None:
        obj = self.normal.pop(key, None) or self.soft.pop(key, None)
        if obj:
            self.nbytes -= obj.size

    def touch(self, key: str) -> None:
        if key in self.normal:
            self.normal.move_to_end(key)
        elif key in self.soft:
            self.soft.move_to_end(key)

    def victim(self) -> Object | None:
        return next(iter(self.normal.values()), None) or next(iter(self.soft.values()), None)


class ObjectTable:
    def __init__(self) -> None:
        self._objects: dict[str, Object] = {}
        self._idle = Idle()
        self._limited: dict[str, Idle] = {}
        """The same once more for each tenant that has a quota."""
        self._unpin: list[tuple[float, int, Object]] = []
        """Soft pins by the time at which they end."""
        self._siblings: dict[str, set[str]] = {}
        self._groups: dict[str, set[str]] = {}
        self._hard: dict[str, Object] = {}
        self._serial = 0
        self.bytes_of: Counter[str] = Counter()
        """Bytes of visible objects by tenant."""
        self.converted = 0

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, key: str) -> bool:
        return key in self._objects

    def get(self, key: str) -> Object | None:
        return self._objects.get(key)

    def keys(self) -> list[str]:
        return list(self._objects)

    def objects(self) -> Iterator[Object]:
        return iter(self._objects.values())

    def add(self, obj: Object) -> None:
        assert obj.key not in self._objects
        obj.visible = True
        self._objects[obj.key] = obj
        self.bytes_of[obj.tenant] += obj.size
        self._idle_add(obj)
        if obj.pin is Pin.NONE and not obj.group and not obj.converted:
            return
        if obj.pin is Pin.HARD:
            self._hard[obj.key] = obj
        elif obj.pin is Pin.SOFT:
            self._serial += 1
            heapq.heappush(self._unpin, (obj.pinned_until, self._serial, obj))
        if obj.group:
            self._groups.setdefault(obj.group, set()).add(obj.key)
        if obj.converted:
            self._siblings.setdefault(obj.native, set()).add(obj.key)
            self.converted += 1

    def add_row(self, objects: Sequence[Object]) -> None:
        """`add`, and touch as a batch, for objects of one tenant without pin, group and origin."""
        names = {obj.key: obj for obj in reversed(objects)}
        size = sum(obj.size for obj in objects)
        for obj in objects:
            obj.visible = True
        self._objects.update(names)
        self._idle.normal.update(names)
        self._idle.nbytes += size
        tenant = objects[0].tenant
        self.bytes_of[tenant] += size
        if tenant in self._limited:
            self._limited[tenant].normal.update(names)
            self._limited[tenant].nbytes += size

    def remove(self, obj: Object) -> None:
        """Make invisible. The space is still the object's while `readers > 0`."""
        del self._objects[obj.key]
        self._idle_drop(obj)
        self._hard.pop(obj.key, None)
        obj.visible = False
        self.bytes_of[obj.tenant] -= obj.size
        if not self.bytes_of[obj.tenant]:
            del self.bytes_of[obj.tenant]
        if obj.group:
            _discard(self._groups, obj.group, obj.key)
        if obj.converted:
            _discard(self._siblings, obj.native, obj.key)
            self.converted -= 1

    def _idle_add(self, obj: Object, *, first: bool = False) -> None:
        self._idle.add(obj, first=first)
        if self._limited and obj.tenant in self._limited:
            self._limited[obj.tenant].add(obj, first=first)

    def _idle_drop(self, obj: Object) -> None:
        self._idle.drop(obj.key)
        if self._limited and obj.tenant in self._limited:
            self._limited[obj.tenant].drop(obj.key)

    # -- use

    def touch(self, keys: Sequence[str]) -> None:
        groups: set[str] = set()
        for key in reversed(keys):
            obj = self._objects.get(key)
            if obj is None:
                continue
            if obj.group and obj.group not in groups:  # once for all keys: a batch is often one group
                groups.add(obj.group)
                for member in self._groups[obj.group]:
                    self._touch(self._objects[member])
            self._touch(obj)

    def _touch(self, obj: Object) -> None:
        self._idle.touch(obj.key)
        if obj.tenant in self._limited:
            self._limited[obj.tenant].touch(obj.key)

    def begin_read(self, opened: Sequence[Object]) -> None:
        """Count one more reader of each; what is read cannot be a victim."""
        for obj in opened:
            if not obj.readers and obj.visible:
                self._idle_drop(obj)
            obj.readers += 1

    def end_read(self, opened: Sequence[Object]) -> list[Object]:
        """Count one reader less; those without any are the most recently used now. Returns removed objects that nobody reads any
        more: their space is free."""
        gone, grouped = [], []
        for obj in reversed(opened):
            obj.readers -= 1
            if not obj.readers and obj.visible:
                self._idle_add(obj)
                if obj.group:
                    grouped.append(obj.key)
            elif not obj.readers:
                gone.append(obj)
        if grouped:
            self.touch(grouped[::-1])
        return gone

    # -- siblings, groups, victims

    def converted_of(self, native: str) -> list[Object]:
        """Converted pages of this native key."""
        return [self._objects[k] for k in self._siblings.get(native, ())]

    def best(self, native: str, origins: Sequence[str]) -> str | None:
        """The key that serves a native page: itself, or the first of `origins` that is there."""
        if native in self._objects:
            return native
        if native not in self._siblings:
            return None
        candidates = (f"{native}{CONVERTED}{o}" for o in origins)
        return next((c for c in candidates if c in self._objects), None)

    def unpin(self, now: float) -> None:
        """Soft pins whose time is up are pins no more."""
        while self._unpin and self._unpin[0][0] <= now:
            obj = heapq.heappop(self._unpin)[2]
            obj.pin = Pin.NONE
            if obj.visible and not obj.readers:
                self._idle_drop(obj)
                self._idle_add(obj, first=True)  # it was written long ago
        if len(self._unpin) > 2 * len(self._objects) + 64:
            self._unpin = [entry for entry in self._unpin if entry[2].visible]
            heapq.heapify(self._unpin)

    def victims(self, tenant: str | None = None) -> list[Object]:
        """What to evict next: an object, or the idle members of its group; empty if nothing may go. With `tenant`, one of that
        tenant, which must be limited."""
        idle = self._idle if tenant is None else self._limited[tenant]
        obj = idle.victim()
        if obj is None:
            return []
        members = [self._objects[k] for k in self._groups.get(obj.group, ())] if obj.group else []
        return [obj, *(o for o in members if o is not obj and not o.readers and o.pin is not Pin.HARD)]

    def hard(self) -> Iterable[Object]:
        """What is hard-pinned."""
        return self._hard.values()

    def evictable(self, tenant: str | None = None) -> int:
        """Bytes that may be evicted; with `tenant`, of that one, which must be limited."""
        return (self._idle if tenant is None else self._limited[tenant]).nbytes

    def limit(self, tenants: Iterable[str]) -> None:
        """Only these tenants have quotas now."""
        wanted = set(tenants)
        for tenant in self._limited.keys() - wanted:
            del self._limited[tenant]
        if new := wanted - self._limited.keys():
            for tenant in new:
                self._limited[tenant] = Idle()
            for obj in (*self._idle.normal.values(), *self._idle.soft.values()):
                if obj.tenant in new:
                    self._limited[obj.tenant].add(obj)

    def check_integrity(self) -> None:
        idle = [o for o in self._objects.values() if not o.readers and o.pin is not Pin.HARD]
        assert self._idle.normal.keys() == {o.key for o in idle if o.pin is Pin.NONE}
        assert self._idle.soft.keys() == {o.key for o in idle if o.pin is Pin.SOFT}
        assert self._idle.nbytes == sum(o.size for o in idle)
        assert self._hard.keys() == {k for k, o in self._objects.items() if o.pin is Pin.HARD}
        for tenant, limited in self._limited.items():
            assert limited.nbytes == sum(o.size for o in idle if o.tenant == tenant)
            assert list(limited.normal) == [k for k, o in self._idle.normal.items() if o.tenant == tenant]
            assert list(limited.soft) == [k for k, o in self._idle.soft.items() if o.tenant == tenant]
        converted = {k: o.native for k, o in self._objects.items() if o.converted}
        assert {(k, n) for n, ks in self._siblings.items() for k in ks} == set(converted.items())
        assert self.converted == len(converted)
        groups = {(k, o.group) for k, o in self._objects.items() if o.group}
        assert {(k, g) for g, ks in self._groups.items() for k in ks} == groups
        assert all(o.visible for o in self._objects.values())
        assert sum(self.bytes_of.values()) == sum(o.size for o in self._objects.values())


def _discard(sets: dict[str, set[str]], name: str, key: str) -> None:
    sets[name].discard(key)
    if not sets[name]:
        del sets[name]
