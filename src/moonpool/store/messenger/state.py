"""A messenger's state: who may read and write what, where. Pure: time is passed in, no I/O, no locks.

It is the only authority on its segment: nobody else says where a key lies, so no restart of another process can serve one key's
bytes under another key.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from moonpool.clock import Clock
from moonpool.errors import KeyBusy, LeaseExpired, MoonpoolError, NativeExists, NoSpace, ObjectTooLarge
from moonpool.keys import PageKey
from moonpool.store.messenger.allocator import Allocator, rounded
from moonpool.store.messenger.leases import Ledger
from moonpool.store.messenger.objects import Object, ObjectTable
from moonpool.types import Hinted, Missed, PoolEvent, PoolStats, Put, PutOutcome, Stored

_MAX_HANDLES = 1 << 17
_MAX_SUBSCRIPTIONS = 64


@dataclass(frozen=True, slots=True)
class Limits:
    high_watermark: float = 0.95
    """Share of the segment above which a put evicts first."""
    eviction_ratio: float = 0.05
    """Share of the segment that such an eviction frees beyond the watermark, so that not every put evicts."""
    reservation_ttl_s: float = 60.0
    """A writer that has not committed by then loses its key to the next writer."""
    changes_kept: int = 1 << 16
    """Most changes kept for the master's index; past that the index is told everything anew. 0 where there is no index."""
    max_objects: int = 1 << 20
    """Bounds the tables' own memory, which small objects would otherwise fill without end."""


@dataclass(slots=True, eq=False)
class Writing:
    obj: Object
    expires: float
    lost: bool = False
    """Another writer took the key. The space stays in quarantine until this one commits, revokes or dies: it may be writing."""


@dataclass(slots=True)
class Subscription:
    events: deque[PoolEvent]
    dropped: int = 0


@dataclass(slots=True)
class Reserved:
    id: int
    offset: int
    size: int


@dataclass(slots=True)
class Changes:
    """What the master's index must be told since the last `take_changes`."""

    there: dict[str, bool] = field(default_factory=dict)
    """Key → whether it is there now."""
    lost: bool = False
    """There were more than were kept: only the whole list of keys tells now."""


class MessengerState:
    """Every method is one atomic step; the caller locks."""

    def __init__(self, capacity: int, clock: Clock, limits: Limits | None = None) -> None:
        self._space, self._clock, self._limits = Allocator(capacity), clock, limits or Limits()
        self._evict_above = int(self._limits.high_watermark * self._space.capacity)
        self._evict_down_to = int(self._evict_above - self._limits.eviction_ratio * self._space.capacity)
        self._table = ObjectTable()
        self._writing: dict[str, Writing] = {}
        self._writes: Ledger[Writing] = Ledger(_MAX_HANDLES)
        self._reads: Ledger[list[Object]] = Ledger(_MAX_HANDLES)
        self._subscriptions: dict[int, Subscription] = {}
        self._owners: dict[str, list[Subscription]] = {}
        self._subscribed: dict[int, list[int]] = {}
        self._ids = count(1)
        self._changes = Changes()
        self._counts: Counter[str] = Counter()

    # -- writing

    def reserve(self, session: int, key: str, size: int) -> Reserved | Put | MoonpoolError:
        """Space for one object (see `KVPool.reserve`)."""
        try:
            if key in self._table:
                return Put.EXISTED
            page = PageKey.parse(key)
            self._refuse(key, page, size)
            offset = self._make_room(key, size)
            writing = Writing(Object(key, offset, size, page), self._clock.now() + self._limits.reservation_ttl_s)
            try:
                handle = self._writes.add(session, writing)
            except MoonpoolError:
                self._space.free(offset, size)
                raise
            if key in self._writing:  # `_refuse` found that its time is up
                self._writing[key].lost = True
            self._writing[key] = writing
            return Reserved(handle, offset, size)
        except MoonpoolError as e:
            return e

    def _refuse(self, key: str, page: PageKey | None, size: int) -> None:
        if page and page.origin and page.native.text in self._table:
            raise NativeExists("a native page is there; a converted one cannot replace it", key=key)
        other = self._writing.get(key)
        if other and self._clock.now() < other.expires:
            raise KeyBusy("another writer is putting this key", key=key, fix="Read it in a moment, or try again.")
        if rounded(size) > self._space.capacity:
            raise ObjectTooLarge(
                "larger than the segment",
                key=key,
                need=f"{size} B",
                have=f"{self._space.capacity} B",
                fix="Enlarge the pool.",
            )

    def _make_room(self, key: str, size: int) -> int:
        need = rounded(size)
        if need > self._space.largest_free:
            self._refuse_if_hopeless(key, need)
        if self._space.used + need > self._evict_above:
            self._evict(max(0, self._evict_down_to - need))
        if len(self._table) + len(self._writes) >= self._limits.max_objects and not self._evict_one():
            raise NoSpace("too many objects", key=key, need=f"< {self._limits.max_objects}", have=str(len(self._table)))
        while (offset := self._space.allocate(size)) is None:
            found = self._evict_one()  # enough bytes in all, but not in one piece
            assert found, "not hopeless, so there was something to evict"
        return offset

    def _evict(self, down_to: int) -> None:
        while self._space.used > down_to and self._evict_one():
            pass

    def _evict_one(self) -> bool:
        victim = self._table.victim()
        if victim:
            self._drop(victim, "evictions")
        return victim is not None

    def _refuse_if_hopeless(self, key: str, need: int) -> None:
        """Raises NoSpace if evicting everything would not do, so that nothing is evicted in vain."""
        pinned = sorted({(o.offset, o.size) for o in self._pinned() if o.size})
        best, end = 0, 0
        for offset, size in [*pinned, (self._space.capacity, 0)]:
            best, end = max(best, offset - end), offset + rounded(size)
        if need > best:
            raise NoSpace(
                "nothing more can be evicted",
                key=key,
                need=f"{need} B in one piece",
                have=f"{best} B; {sum(rounded(s) for _, s in pinned)} B are being read or written",
                fix="Close read leases, commit or revoke reservations, or enlarge the pool.",
            )

    def _pinned(self) -> list[Object]:
        """What is being read or written, once per handle."""
        return [w.obj for w in self._writes.entries()] + [o for opened in self._reads.entries() for o in opened]

    def _drop(self, obj: Object, why: str) -> None:
        self._table.remove(obj)
        self._note(obj.key, there=False)
        self._counts[why] += 1
        if not obj.readers:
            self._space.free(obj.offset, obj.size)

    def commit(self, session: int, handles: Sequence[int]) -> list[PutOutcome]:
        outcomes = [self._commit(session, h) for h in handles]
        self._table.touch([o.key for o in outcomes if isinstance(o, Object)])
        return [Put.STORED if isinstance(o, Object) else o for o in outcomes]

    def _commit(self, session: int, handle: int) -> Object | MoonpoolError:
        try:
            writing = self._writes.take(session, handle)
            obj = writing.obj
            if writing.lost:
                self._space.free(obj.offset, obj.size)
                raise LeaseExpired("the reservation ran out and another writer took the key", key=obj.key)
            del self._writing[obj.key]
            if obj.page and obj.page.origin and obj.page.native.text in self._table:
                self._space.free(obj.offset, obj.size)
                raise NativeExists("a native page came first", key=obj.key)
            self._publish(obj)
        except MoonpoolError as e:
            return e
        return obj

    def _publish(self, obj: Object) -> None:
        self._table.add(obj)
        self._note(obj.key, there=True)
        self._counts["puts"] += 1
        if obj.page and not obj.page.origin:
            for approximate in self._table.converted_of(obj.key):
                self._drop(approximate, "replaced")
            self._emit(obj.page.owner, Stored(obj.key, obj.size))

    def revoke(self, session: int, handles: Sequence[int]) -> None:
        """Handles that the session does not hold (any more) are passed over: revoking twice is harmless."""
        for handle in handles:
            if writing := self._writes.discard(session, handle):
                self._abandon(writing)

    def _abandon(self, writing: Writing) -> None:
        self._space.free(writing.obj.offset, writing.obj.size)
        self._counts["revoked"] += 1
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

    def close_read(self, session: int, handles: Sequence[int]) -> None:
        """Handles that the session does not hold (any more) are passed over: closing twice is harmless."""
        for handle in handles:
            if opened := self._reads.discard(session, handle):
                self._unread(opened)

    def _unread(self, opened: list[Object]) -> None:
        for obj in self._table.end_read(opened):
            self._space.free(obj.offset, obj.size)

    def lookup(self, keys: Sequence[str], origins: Sequence[str]) -> list[str | None]:
        return [self._table.best(k, origins) for k in keys]

    def exist(self, keys: Sequence[str]) -> list[bool]:
        return [k in self._table for k in keys]

    def remove(self, keys: Sequence[str]) -> list[bool]:
        found = []
        for key in keys:
            obj = self._table.get(key)
            found.append(obj is not None)
            if obj:
                self._drop(obj, "removed")
        return found

    # -- events

    def subscribe(self, session: int, owners: Sequence[str], capacity: int) -> int:
        if len(self._subscriptions) >= _MAX_SUBSCRIPTIONS:
            raise NoSpace("too many subscriptions", need=f"<= {_MAX_SUBSCRIPTIONS}", have=str(len(self._subscriptions)))
        handle = next(self._ids)
        subscription = Subscription(deque(maxlen=capacity))
        self._subscriptions[handle] = subscription
        self._subscribed.setdefault(session, []).append(handle)
        for owner in owners:
            self._owners.setdefault(owner, []).append(subscription)
        return handle

    def _emit(self, owner: str, event: PoolEvent) -> None:
        for subscription in self._owners.get(owner, ()):
            if len(subscription.events) == subscription.events.maxlen:
                subscription.dropped += 1
                self._counts["events_dropped"] += 1
            subscription.events.append(event)

    def announce(self, keys: Sequence[str], *, hinted: bool) -> None:
        for key in keys:
            page = PageKey.parse(key)
            if page and not page.origin:
                self._emit(page.owner, Hinted(key) if hinted else Missed(key))

    def watches(self) -> bool:
        return bool(self._subscriptions)

    def has_events(self, subscription: int) -> bool:
        """Whether `next_events` would give something, if only an error."""
        held = self._subscriptions.get(subscription)
        return held is None or bool(held.events)

    def next_events(self, subscription: int, limit: int) -> tuple[list[PoolEvent], int]:
        """Up to `limit` events that are there now, and how many were ever dropped."""
        held = self._subscriptions.get(subscription)
        if held is None:
            raise LeaseExpired("no such subscription", key=str(subscription))
        events = [held.events.popleft() for _ in range(min(limit, len(held.events)))]
        return events, held.dropped

    # -- sessions, figures

    def end_session(self, session: int) -> None:
        """Give back all that a session held: nothing half-written stays, nothing stays open."""
        for writing in self._writes.end(session):
            self._abandon(writing)
        for opened in self._reads.end(session):
            self._unread(opened)
        for handle in self._subscribed.pop(session, ()):
            gone = self._subscriptions.pop(handle)
            for owner in [o for o, subs in self._owners.items() if gone in subs]:
                self._owners[owner] = [s for s in self._owners[owner] if s is not gone]
                if not self._owners[owner]:
                    del self._owners[owner]

    def _note(self, key: str, *, there: bool) -> None:
        if self._changes.lost:
            return
        self._changes.there[key] = there
        if len(self._changes.there) > self._limits.changes_kept:
            self._changes = Changes(lost=True)

    def take_changes(self) -> Changes:
        taken, self._changes = self._changes, Changes()
        return taken

    def keys(self) -> list[str]:
        return self._table.keys()

    def stats(self) -> PoolStats:
        named = {n: self._counts[n] for n in ("puts", "hits", "misses", "evictions", "revoked", "events_dropped")}
        return PoolStats(
            capacity=self._space.capacity,
            used=self._space.used,
            largest_free=self._space.largest_free,
            objects=len(self._table),
            converted_objects=self._table.converted,
            reads_open=len(self._reads),
            writes_open=len(self._writes),
            **named,
        )

    def check_integrity(self) -> None:
        """Space in use is exactly that of visible objects, open reads of removed ones, and reservations."""
        self._space.check_integrity()
        self._table.check_integrity()
        held = {id(o): o for k in self._table.keys() if (o := self._table.get(k))}  # noqa: SIM118 - a table, not a dict
        held.update((id(o), o) for o in self._pinned())
        assert sum(rounded(o.size) for o in held.values()) == self._space.used
        open_reads = Counter(id(o) for opened in self._reads.entries() for o in opened)
        assert all(o.readers == open_reads[i] for i, o in held.items())
