"""A messenger's state: who may read and write what, where. Pure: time is passed in, no I/O, no locks.

It is the only authority on its segment: nobody else says where a key lies, so no restart of another process can serve one key's
bytes under another key.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import repeat

from moonpool.clock import Clock
from moonpool.errors import (
    Draining,
    KeyBusy,
    LeaseExpired,
    MoonpoolError,
    NativeExists,
    NoSpace,
    ObjectTooLarge,
)
from moonpool.keys import owner_of
from moonpool.store.messenger.allocator import rounded
from moonpool.store.messenger.leases import Ledger
from moonpool.store.messenger.objects import CONVERTED, Object
from moonpool.store.messenger.records import Backing, Limits, Reserved, Row, Writing
from moonpool.store.messenger.room import Room
from moonpool.store.messenger.subscriptions import Subscriptions
from moonpool.store.messenger.tenants import bare, tenant_of
from moonpool.types import Pin, PoolStats, Put, PutOptions, PutOutcome, Removed, Stored

_MAX_HANDLES = 1 << 17
_PLAIN = PutOptions()


class MessengerState(Room):
    """Every method is one atomic step; the caller locks."""

    def __init__(
        self, capacity: int, clock: Clock, limits: Limits | None = None, backing: Backing | None = None
    ) -> None:
        super().__init__(capacity, clock, limits or Limits(), backing)
        self._unbacked: deque[Object] = deque(maxlen=2 * self._limits.max_objects)
        """In the order of their puts; some may be gone, or have a copy below, by the time they come up."""
        self.draining = False
        self._quarantine: list[Object] = []
        self._held_for_backing: list[Object] = []
        self._writing: dict[str, Writing] = {}
        self._writes: Ledger[Writing] = Ledger(_MAX_HANDLES)
        self._reads: Ledger[list[Object]] = Ledger(_MAX_HANDLES)
        self.events = Subscriptions()

    # -- writing

    def reserve(
        self, session: int, key: str, size: int, options: PutOptions = _PLAIN, group: str = ""
    ) -> Reserved | Put | MoonpoolError:
        """Space for one object (see `KVPool.reserve`)."""
        try:
            if not options.replace and self.has(key):
                return Put.EXISTED
            if self.draining:  # nothing new; what lies below may still come up
                return Draining("the messenger is being emptied", key=bare(key), fix="Put it on another messenger.")
            now = self._clock.now()
            writing = Writing(self._new(key, size, options, group, now), now + self._limits.reservation_ttl_s)
            writing.replace = options.replace
            return self._reserve(session, writing, now)
        except MoonpoolError as e:
            return e

    def reserve_all(
        self, session: int, items: Sequence[tuple[str, int]], options: PutOptions = _PLAIN, groups: Sequence[str] = ()
    ) -> list[Reserved | Put | MoonpoolError] | Row:
        """`reserve` for each; a batch of new keys lies in one piece if there is one."""
        if options == _PLAIN and not groups and (row := self._reserve_row(session, items)):
            return row
        results: list[Reserved | Put | MoonpoolError] = []
        try:
            for (key, size), group in zip(items, groups or repeat("")):  # noqa: B905 - endless
                results.append(self.reserve(session, key, size, options, group))
        except BaseException:  # nobody would be told of those before
            self.revoke(session, [r.id for r in results if isinstance(r, Reserved)])
            raise
        return results

    def _reserve_row(self, session: int, items: Sequence[tuple[str, int]]) -> Row | None:
        """The usual batch: plain objects that are all new, and fit. None if this one is not."""
        table, writing, now = self._table, self._writing, self._clock.now()
        sizes = [rounded(size) for _, size in items]
        total = sum(sizes)
        keys = {key for key, _ in items}
        if self._quotas or self.draining or len(keys) < len(items) or not total or total > self._evict_down_to // 4:
            return None
        if any(key in table or key in writing or CONVERTED in key or key in self._backing for key in keys):
            return None
        if len(table) + len(self._writes) + len(items) > self._limits.max_objects or not self._writes.room(
            session, len(items)
        ):
            return None
        table.unpin(now)
        start = offset = self._room_in_a_row(total, len(items))
        if start is None or offset is None:
            return None
        expires = now + self._limits.reservation_ttl_s
        tenant = tenant_of(items[0][0])
        entries: list[Writing] = []
        for (key, size), taken in zip(items, sizes, strict=True):
            owner = owner_of(bare(key) if tenant else key)
            entry = writing[key] = Writing(Object(key, offset, size, owner, tenant), expires)
            entries.append(entry)
            offset += taken
        self._being_written[tenant] += sum(size for _, size in items)
        return Row(self._writes.add_all(session, entries), start)

    def _new(self, key: str, size: int, options: PutOptions, group: str, now: float) -> Object:
        tenant, name = tenant_of(key), bare(key)
        obj = Object(key, 0, size, owner_of(name), tenant, options.pin)
        obj.converted = bool(obj.owner) and CONVERTED in name
        if options.pin is Pin.SOFT:
            obj.pinned_until = now + min(options.soft_pin_ttl_s, self._limits.max_soft_pin_s)
        if group:
            obj.group = f"{tenant}\x1f{group}"
        return obj

    def _reserve(self, session: int, writing: Writing, now: float) -> Reserved:
        obj = writing.obj
        self._refuse(obj, now)
        self._table.unpin(now)
        self._make_quota(obj)
        obj.offset = self._make_room(obj.key, obj.size)
        try:
            handle = self._writes.add(session, writing)
        except MoonpoolError:
            self._space.free(obj.offset, obj.size)
            raise
        if obj.key in self._writing:  # `_refuse` found that its time is up
            self._writing[obj.key].lost = True
        self._writing[obj.key] = writing
        self._being_written[obj.tenant] += obj.size
        return Reserved(handle, obj.offset, obj.size)

    def _refuse(self, obj: Object, now: float) -> None:
        if obj.converted and self.has(obj.native):
            raise NativeExists("a native page is there; a converted one cannot replace it", key=bare(obj.key))
        other = self._writing.get(obj.key)
        if other and now < other.expires:
            raise KeyBusy(
                "another writer is putting this key", key=bare(obj.key), fix="Read it in a moment, or try again."
            )
        if rounded(obj.size) > self._space.capacity:
            raise ObjectTooLarge(
                "larger than the segment",
                key=bare(obj.key),
                need=f"{obj.size} B",
                have=f"{self._space.capacity} B",
                fix="Enlarge the pool.",
            )
        if self._too_many() and not self._table.victims():
            have = f"{len(self._table)}, none of which can be evicted, and {len(self._writes)} being written"
            raise NoSpace("too many objects", key=bare(obj.key), need=f"< {self._limits.max_objects}", have=have)

    def _too_many(self) -> bool:
        return len(self._table) + len(self._writes) >= self._limits.max_objects

    def _pinned(self) -> list[Object]:
        """What cannot be evicted, once per handle."""
        in_use = [w.obj for w in self._writes.entries()] + [o for opened in self._reads.entries() for o in opened]
        return in_use + list(self._table.hard()) + self._quarantine + self._held_for_backing

    def commit(self, session: int, handles: Sequence[int]) -> list[PutOutcome]:
        if self._commit_row(session, handles):
            return [Put.STORED] * len(handles)
        outcomes = [self._commit(session, h) for h in handles]
        self._table.touch([o.key for o in outcomes if isinstance(o, Object)])
        return [Put.STORED if isinstance(o, Object) else o for o in outcomes]

    def _commit_row(self, session: int, handles: Sequence[int]) -> bool:
        """The usual batch: plain objects that nothing stands in the way of. False, and nothing done, if this one is not."""
        writes = [self._writes.find(session, handle) for handle in handles]
        plain = [
            w
            for w in writes
            if w and not (w.lost or w.replace or w.obj.pin is not Pin.NONE or w.obj.group or w.obj.converted)
        ]
        if len(plain) < len(handles) or len(plain) < 2 or len(set(handles)) < len(handles):
            return False
        self._writes.take_all(session, handles)
        objects = [w.obj for w in plain]
        for obj in objects:
            del self._writing[obj.key]
            self._being_written[obj.tenant] -= obj.size
        self._table.add_row(objects)
        for obj in objects:
            self._note(obj.key, there=True)
            if obj.owner:
                self._native_came(obj)
        if self._has_backing:
            self._unbacked.extend(objects)
        self._counts["puts"] += len(objects)
        return True

    def _commit(self, session: int, handle: int) -> Object | MoonpoolError:
        try:
            writing = self._writes.take(session, handle)
            obj = writing.obj
            self._being_written[obj.tenant] -= obj.size
            if writing.lost:
                self._space.free(obj.offset, obj.size)
                raise LeaseExpired("the reservation ran out and another writer took the key", key=bare(obj.key))
            del self._writing[obj.key]
            if obj.converted and self.has(obj.native):
                self._space.free(obj.offset, obj.size)
                raise NativeExists("a native page came first", key=bare(obj.key))
            if writing.replace and (old := self._table.get(obj.key)):
                self._drop(old, "replaced")
            self._publish(obj)
        except MoonpoolError as e:
            return e
        return obj

    def _publish(self, obj: Object) -> None:
        self._table.add(obj)
        self._note(obj.key, there=True)
        self._counts["puts"] += 1
        if self._has_backing:
            self._unbacked.append(obj)
        if obj.owner and not obj.converted:
            self._native_came(obj)

    def _native_came(self, obj: Object) -> None:
        for approximate in self._table.converted_of(obj.key):
            self._drop(approximate, "replaced")
        self.events.emit(obj.tenant, obj.owner, Stored(bare(obj.key), obj.size))

    def revoke(self, session: int, handles: Sequence[int]) -> None:
        """Handles that the session does not hold (any more) are passed over: revoking twice is harmless."""
        for handle in handles:
            if writing := self._writes.discard(session, handle):
                self._abandon(writing)
                self._space.free(writing.obj.offset, writing.obj.size)

    def _abandon(self, writing: Writing) -> None:
        """The key is free again; the space is not yet."""
        self._counts["revoked"] += 1
        self._being_written[writing.obj.tenant] -= writing.obj.size
        if not writing.lost:
            del self._writing[writing.obj.key]

    # -- reading

    def open_read(self, session: int, keys: Sequence[str]) -> tuple[int, list[tuple[int, int] | None]]:
        found = [self._table.get(k) for k in keys]
        opened = [o for o in found if o]
        handle = self._reads.add(session, opened) if opened else 0
        self._table.begin_read(opened)
        self._counts["hits"] += len(opened)
        self._counts["misses"] += len(found) - len(opened)
        return handle, [(o.offset, o.size) if o else None for o in found]

    def close_read(self, session: int, handles: Sequence[int]) -> list[bool]:
        """Whether the session still held each handle: only then is what was read through it good. Closing twice is harmless."""
        held = []
        for handle in handles:
            opened = self._reads.discard(session, handle)
            held.append(opened is not None)
            if opened:
                self._unread(opened)
        return held

    def end_copy(self, session: int, handle: int, *, remove: bool) -> list[str] | None:
        """Close a read. The keys that it opened, if all that is still what is there; then `remove` takes it away. Else None."""
        opened = self._reads.discard(session, handle)
        if opened is None:
            return None
        current = all(o.visible for o in opened)
        for obj in dict.fromkeys(opened) if current and remove else ():
            self._drop(obj, "removed")
        self._unread(opened)
        return [o.key for o in opened] if current else None

    def _unread(self, opened: list[Object]) -> None:
        for obj in self._table.end_read(opened):
            self._space.free(obj.offset, obj.size)

    def lookup(self, keys: Sequence[str], origins: Sequence[str]) -> list[str | None]:
        if not self._has_backing:
            return [self._table.best(k, origins) for k in keys]
        return [next((c for c in (k, *(k + CONVERTED + o for o in origins)) if self.has(c)), None) for k in keys]

    def exist(self, keys: Sequence[str]) -> list[bool]:
        if not self._has_backing:
            return [k in self._table for k in keys]
        return [self.has(k) for k in keys]

    def find(self, key: str) -> Object | None:
        """The object in memory, for its figures."""
        return self._table.get(key)

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Removed]:
        """Out of memory; the caller takes the copies in the tier below."""
        found = []
        for key in keys:
            obj = self._table.get(key)
            if obj is None:
                self._cancel_load(key)
                found.append(Removed.MISSING)
            elif obj.pin is Pin.HARD and not force:
                found.append(Removed.PINNED)
            else:
                self._drop(obj, "removed")
                found.append(Removed.REMOVED)
        return found

    # -- the tier below

    def take_unbacked(self, limit: int) -> list[Object]:
        """Up to `limit` bytes of objects (at least one, if there is one) that have no copy below. They are held as if read, until
        `backed`."""
        taken: list[Object] = []
        while self._unbacked and limit > 0:
            obj = self._unbacked.popleft()
            replaced = self._writing.get(obj.key)
            if obj.visible and obj.key not in self._backing and not (replaced and replaced.committing):
                taken.append(obj)
                limit -= obj.size
        self._table.begin_read(taken)
        self._held_for_backing += taken
        return taken

    def copied(self, obj: Object) -> bool:
        """Whether the copy that was just made of it may stay: not of what was removed, or is about to be replaced, meanwhile."""
        writing = self._writing.get(obj.key)
        return obj.visible and not (writing and writing.committing)

    def backed(self, taken: Sequence[Object]) -> None:
        for obj in taken:
            self._held_for_backing.remove(obj)
        self._unread(list(reversed(taken)))  # in the order of their puts, as they were

    def below(self, keys: Sequence[str]) -> list[int]:
        """Places of the keys that are only in the tier below."""
        return [i for i, k in enumerate(keys) if k not in self._table and k in self._backing]

    def begin_load(self, session: int, key: str) -> Reserved | MoonpoolError | None:
        """Space for what lies below; None if it is in memory, or gone, by now."""
        size = self._backing.size(key)
        if key in self._table or size is None:
            return None
        try:
            now = self._clock.now()
            return self._reserve(session, Writing(self._new(key, size, _PLAIN, "", now), float("inf")), now)
        except MoonpoolError as e:
            return e

    def _cancel_load(self, key: str) -> None:
        """What is removed while it comes up must not be there afterwards."""
        writing = self._writing.get(key)
        if writing and writing.loads:
            writing.lost = True
            del self._writing[key]

    def end_load(self, session: int, handle: int, lease: int) -> tuple[int, tuple[int, int] | None]:
        """It is there now, and open in `lease`, or in a new one if that is 0. Returns the lease and the span; None if it was removed
        meanwhile."""
        writing = self._writes.take(session, handle)
        obj = writing.obj
        self._being_written[obj.tenant] -= obj.size
        if writing.lost:
            self._space.free(obj.offset, obj.size)
            return lease, None
        del self._writing[obj.key]
        self._table.add(obj)
        self._note(obj.key, there=True)  # the tier below may have dropped it meanwhile, and that was told
        return self._open_more(session, lease, obj), (obj.offset, obj.size)

    def open_one(self, session: int, key: str, lease: int) -> tuple[int, tuple[int, int] | None]:
        """Open one more object in `lease`, or in a new one if that is 0; None if it is not in memory."""
        obj = self._table.get(key)
        return (self._open_more(session, lease, obj), (obj.offset, obj.size)) if obj else (lease, None)

    def _open_more(self, session: int, lease: int, obj: Object) -> int:
        if lease:
            self._reads.get(session, lease).append(obj)
        else:
            lease = self._reads.add(session, [obj])
        self._table.begin_read([obj])
        self._counts["hits"] += 1
        self._counts["misses"] -= 1  # `open_read` took it for one
        return lease

    def replaced_below(self, session: int, handles: Sequence[int]) -> list[str]:
        """Keys that these reservations will replace and that have a copy below. Until the commit no new copy is made of them."""
        keys = []
        for handle in handles:
            writing = self._writes.find(session, handle)
            if writing and writing.replace:
                writing.committing = True
                if writing.obj.key in self._backing:
                    keys.append(writing.obj.key)
        return keys

    def found_below(self, keys: Sequence[str]) -> None:
        """The tier below has these from before."""
        for key in keys:
            self._note(key, there=True)

    def gone_below(self, keys: Sequence[str]) -> None:
        """The tier below dropped these."""
        for key in keys:
            if not self.has(key):
                self._note(key, there=False)

    # -- sessions, figures

    def is_writing(self, session: int) -> bool:
        return self._writes.holds(session)

    def end_session(self, session: int) -> list[Object]:
        """Give back all that a session held: nothing half-written stays, nothing stays open.

        Returns what it was still writing. That space stays in quarantine until `release`, for its writer may be alive and write on.
        """
        unfinished = []
        for writing in self._writes.end(session):
            self._abandon(writing)
            unfinished.append(writing.obj)
        self._quarantine += unfinished
        for opened in self._reads.end(session):
            self._unread(opened)
        self.events.end_session(session)
        return unfinished

    def release(self, unfinished: Sequence[Object]) -> None:
        """Their writer cannot write any more."""
        for obj in unfinished:
            self._quarantine.remove(obj)
            self._space.free(obj.offset, obj.size)

    def keys(self) -> list[str]:
        return self._table.keys()

    def stats(self) -> PoolStats:
        names = ("puts", "hits", "misses", "evictions", "revoked", "lost_unspilled")
        named = {n: self._counts[n] for n in names}
        return PoolStats(
            capacity=self._space.capacity,
            used=self._space.used,
            largest_free=self._space.largest_free,
            objects=len(self._table),
            converted_objects=self._table.converted,
            reads_open=len(self._reads),
            writes_open=len(self._writes),
            events_dropped=self.events.dropped,
            **named,
        )

    def check_integrity(self) -> None:
        """Space in use is exactly that of visible objects, open reads of removed ones, and reservations."""
        self._table.check_integrity()
        held = {id(o): o for o in (*self._table.objects(), *self._pinned(), *self._held_for_backing)}
        self._space.check_integrity((o.offset, o.size) for o in held.values())
        open_reads = Counter(id(o) for opened in self._reads.entries() for o in opened)
        open_reads.update(id(o) for o in self._held_for_backing)
        assert all(o.readers == open_reads[i] for i, o in held.items())
        written: Counter[str] = Counter()
        for writing in self._writes.entries():
            written[writing.obj.tenant] += writing.obj.size
        assert +written == +self._being_written
