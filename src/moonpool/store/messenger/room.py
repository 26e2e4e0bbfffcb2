"""Room in the segment: what may go so that something new may come. Pure, like the state that builds on it.

Nothing is evicted in vain: where evicting everything would not do, the answer is an error at once. Ahead of need only a few objects
go in one step, so that nobody waits for thousands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping

from moonpool.clock import Clock
from moonpool.errors import NoSpace, QuotaExceeded
from moonpool.store.messenger.allocator import Allocator, rounded
from moonpool.store.messenger.objects import Object, ObjectTable
from moonpool.store.messenger.records import Backing, Changes, Limits, NoBacking
from moonpool.store.messenger.tenants import bare

_EVICTIONS_PER_PUT = 32
"""Most evictions ahead of need in one step."""


class Room(ABC):
    """Every method is one atomic step; the caller locks."""

    def __init__(self, capacity: int, clock: Clock, limits: Limits, backing: Backing | None) -> None:
        self._space, self._clock, self._limits = Allocator(capacity), clock, limits
        self._backing = NoBacking() if backing is None else backing
        self._has_backing = backing is not None
        self._table = ObjectTable()
        self._quotas: dict[str, int] = {}
        self._being_written: Counter[str] = Counter()
        """Bytes reserved and not yet committed, by tenant."""
        self._evict_above = int(limits.high_watermark * self._space.capacity)
        self._evict_down_to = int(self._evict_above - limits.eviction_ratio * self._space.capacity)
        self._changes = Changes()
        self._counts: Counter[str] = Counter()

    @abstractmethod
    def _pinned(self) -> list[Object]:
        """What cannot be evicted, once per handle."""

    @abstractmethod
    def _too_many(self) -> bool:
        """There are as many objects as the tables may hold."""

    def _room_in_a_row(self, total: int, count: int) -> int | None:
        over = self._space.used + total - self._evict_above
        if over > 0:
            if over > self._table.evictable() or count == 1:
                return None
            for _ in range(_EVICTIONS_PER_PUT * count):
                if self._space.used + total <= self._evict_down_to or not self._evict_one():
                    break
            if self._space.used + total > self._evict_above:
                return None
        return self._space.allocate(total)

    def _make_quota(self, obj: Object) -> None:
        """Evict objects of the tenant until the new one is within its quota. Raises QuotaExceeded, and evicts nothing then."""
        limit = self._quotas.get(obj.tenant)
        if limit is None:
            return
        held = self._table.bytes_of[obj.tenant] + self._being_written[obj.tenant]
        over = held + obj.size - limit
        if over > self._table.evictable(obj.tenant):
            raise QuotaExceeded(
                "the tenant's quota is used up, and no more of it can be evicted",
                key=bare(obj.key),
                need=f"{obj.size} B",
                have=f"{held} B of {limit} B used by tenant `{obj.tenant}`",
                fix="Raise the quota, remove objects, or unpin some.",
            )
        if over > 0:
            self._refuse_if_hopeless(obj.key, rounded(obj.size))
        while over > 0:
            over -= sum(victim.size for victim in self._evict_one(obj.tenant))

    def _make_room(self, key: str, size: int) -> int:
        need = rounded(size)
        if need > self._space.largest_free and not self._next_victim_makes(need):
            self._refuse_if_hopeless(key, need)
        if self._space.used + need > self._evict_above:
            self._evict(max(0, self._evict_down_to - need))
        if self._too_many():
            self._evict_one()
        while (offset := self._space.allocate(size)) is None:
            found = self._evict_one()  # enough bytes in all, but not in one piece
            assert found, "not hopeless, so there was something to evict"
        return offset

    def _next_victim_makes(self, need: int) -> bool:
        """Whether evicting one object leaves a block of `need` bytes: mostly so, and much cheaper to see than all that is pinned."""
        victims = self._table.victims()
        return bool(victims) and self._space.would_be_free(victims[0].offset, victims[0].size) >= need

    def _evict(self, down_to: int) -> None:
        for _ in range(_EVICTIONS_PER_PUT):
            if self._space.used <= down_to or not self._evict_one():
                break

    def _evict_one(self, tenant: str | None = None) -> list[Object]:
        """Evict the next object, with its group. Returns what went; nothing if nothing may."""
        victims = self._table.victims(tenant)
        for victim in victims:
            self._drop(victim, "evictions")
            if self._has_backing and victim.key not in self._backing:
                self._counts["lost_unspilled"] += 1
        return victims

    def _refuse_if_hopeless(self, key: str, need: int) -> None:
        """Raises NoSpace if evicting everything would not do, so that nothing is evicted in vain."""
        pinned = sorted({(o.offset, o.size) for o in self._pinned() if o.size})
        best, end = 0, 0
        for offset, size in [*pinned, (self._space.capacity, 0)]:
            best, end = max(best, offset - end), offset + rounded(size)
        if need > best:
            hard = sum(rounded(o.size) for o in self._table.hard())
            free = self._space.capacity - self._space.used
            raise NoSpace(
                "nothing more can be evicted",
                key=bare(key),
                need=f"{need} B in one piece",
                have=f"{best} B (free: {free} B, in one piece {self._space.largest_free} B; "
                f"hard-pinned: {hard} B; in use: {sum(rounded(s) for _, s in pinned)} B, being read or written or pinned)",
                fix="Close read leases, commit or revoke reservations, unpin, or enlarge the pool.",
            )

    def _drop(self, obj: Object, why: str) -> None:
        self._table.remove(obj)
        if obj.key not in self._backing:
            self._note(obj.key, there=False)
        self._counts[why] += 1
        if not obj.readers:
            self._space.free(obj.offset, obj.size)

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Bytes that each of these tenants may hold here. Other tenants have no limit."""
        self._quotas = dict(quotas)
        self._table.limit(quotas)

    def used_by_tenant(self) -> dict[str, int]:
        return dict(self._table.bytes_of)

    def has(self, key: str) -> bool:
        return key in self._table or key in self._backing

    def _note(self, key: str, *, there: bool) -> None:
        if self._changes.lost:
            return
        self._changes.there[key] = there
        if len(self._changes.there) > self._limits.changes_kept:
            self._changes = Changes(lost=True)

    def take_changes(self) -> Changes:
        taken, self._changes = self._changes, Changes()
        return taken

    def fill(self) -> float:
        """Share of the segment that is taken."""
        return self._space.used / self._space.capacity if self._space.capacity else 1.0
