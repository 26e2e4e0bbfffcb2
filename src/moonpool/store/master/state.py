"""The index of the pool: who is alive and who holds what. Pure, and allowed to be lost: messengers tell it everything again.

It never says where in a segment an object lies, so an index that is wrong costs a miss and never a byte.

Memory per key is what bounds a pool's size, so a key held once costs one entry and its text; a messenger that goes is forgotten
at once by a mark on it, and its keys are cleared away step by step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from moonpool.clock import Clock
from moonpool.errors import NoSpace, NotFound
from moonpool.types import MessengerInfo

MAX_MEMBERS = 1024
"""Each holds at most its own `max_objects` keys, so the index is bounded too."""
MAX_TENANTS = 65536
_SWEEP = 4096
"""Keys of forgotten messengers cleared away in one step."""


@dataclass(slots=True, eq=False)
class Member:
    info: MessengerInfo
    generation: str
    alive: bool = True
    keys: set[str] = field(default_factory=set)
    tenants: dict[str, int] = field(default_factory=dict)


Holders: TypeAlias = Member | tuple[Member, ...]
"""One member, which is the usual case, or several."""


class MasterState:
    """Every method is one atomic step; the caller locks. `seen` alone may be called without."""

    def __init__(self, clock: Clock, *, expiry_s: float = 10.0) -> None:
        self._clock, self._expiry_s = clock, expiry_s
        self._members: dict[str, Member] = {}
        self._holders: dict[str, Holders] = {}
        self._seen: dict[str, float] = {}
        self._gone: list[Member] = []
        self._checked = clock.now()
        self._quotas: dict[str, int] = {}

    # -- members

    def register(self, info: MessengerInfo, generation: str) -> None:
        """A messenger joins with an empty list of keys; one of the same name that was there before is replaced.

        Raises NoSpace past MAX_MEMBERS.
        """
        self.forget(info.name)
        if len(self._members) >= MAX_MEMBERS:
            raise NoSpace("too many messengers", key=info.name, need=f"<= {MAX_MEMBERS}", have=str(len(self._members)))
        self._members[info.name] = Member(info, generation)
        self._seen[info.name] = self._clock.now()

    def seen(self, name: str) -> bool:
        """A sign of life. False for a messenger that is not known (any more): it must register again. One step of the
        interpreter, so it needs no lock: whatever keeps the index busy is no evidence against a messenger."""
        if name not in self._members:
            return False
        self._seen[name] = self._clock.now()
        return True

    def report(self, info: MessengerInfo, tenants: dict[str, int]) -> None:
        """A messenger's figures. Raises NotFound."""
        member = self._member(info.name)
        member.info, member.tenants = info, tenants

    def publish(self, name: str, added: Sequence[str], removed: Sequence[str]) -> None:
        member = self._member(name)
        self._seen[name] = self._clock.now()
        for key in removed:
            if key in member.keys:
                member.keys.discard(key)
                self._unhold(key, member)
        holders, mine = self._holders, member.keys
        for key in added:
            if key not in mine:
                mine.add(key)
                there = holders.get(key)
                holders[key] = member if there is None else (*_alive(there), member)

    def messengers(self) -> list[MessengerInfo]:
        self._expire()
        return [self._members[name].info for name in sorted(self._members)]

    def locate(self, keys: Sequence[str]) -> list[list[str]]:
        self._expire()
        found = [self._holders.get(k) for k in keys]
        return [sorted(m.info.name for m in _alive(h)) if h else [] for h in found]

    def _member(self, name: str) -> Member:
        if name not in self._members:
            raise NotFound("no such messenger", key=name, fix="Register first.")
        return self._members[name]

    def _expire(self) -> None:
        """Forget members without a sign of life. A gap since the last check that is longer than the expiry is the master's own
        stall (it was frozen): that says nothing about anybody else, so everyone gets a fresh term."""
        now = self._clock.now()
        stalled = now - self._checked > self._expiry_s
        self._checked = now
        for name in list(self._members):
            if stalled:
                self._seen[name] = now
            elif now - self._seen[name] > self._expiry_s:
                self.forget(name)

    def tick(self) -> None:
        """Call several times a second, so that a stall can be told from silence, and to clear away what forgotten messengers
        held."""
        self._expire()
        self._sweep()

    def forget(self, name: str, generation: str = "") -> None:
        """This messenger is gone; with `generation`, only if it is still that one."""
        member = self._members.get(name)
        if member and generation in ("", member.generation):
            del self._members[name], self._seen[name]
            member.alive = False
            self._gone.append(member)

    def _sweep(self) -> None:
        if self._gone:
            member = self._gone[-1]
            for key in list(islice(member.keys, _SWEEP)):
                member.keys.discard(key)
                self._unhold(key, member)
            if not member.keys:
                self._gone.pop()

    def _unhold(self, key: str, member: Member) -> None:
        holders = self._holders.get(key)
        rest = [m for m in _alive(holders) if m is not member] if holders else []
        if not rest:
            self._holders.pop(key, None)
        else:
            self._holders[key] = rest[0] if len(rest) == 1 else tuple(rest)

    # -- quotas

    def set_quota(self, tenant: str, limit: int | None) -> None:
        """Bytes that the tenant may hold in the whole pool; None lifts the limit. Raises NoSpace past MAX_TENANTS."""
        if limit is None:
            self._quotas.pop(tenant, None)
        elif tenant not in self._quotas and len(self._quotas) >= MAX_TENANTS:
            raise NoSpace("too many quotas", key=tenant, need=f"<= {MAX_TENANTS}", have=str(len(self._quotas)))
        else:
            self._quotas[tenant] = limit

    def quotas_for(self, name: str) -> dict[str, int]:
        """What this messenger may hold of each tenant: the quota less what the others hold, by their last figures."""
        member = self._members.get(name)
        used = self._used()
        mine = member.tenants if member else {}
        return {t: max(0, limit - used[t] + mine.get(t, 0)) for t, limit in self._quotas.items()}

    def quotas(self) -> dict[str, tuple[int, int]]:
        """Limit (-1: none) and bytes held, by tenant."""
        used = self._used()
        return {t: (self._quotas.get(t, -1), used[t]) for t in sorted(self._quotas.keys() | used.keys())}

    def _used(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for member in self._members.values():
            total.update(member.tenants)
        return total

    @property
    def members(self) -> int:
        return len(self._members)

    @property
    def keys(self) -> int:
        return len(self._holders)

    def check_integrity(self) -> None:
        for member in self._members.values():
            assert member.alive
            assert all(member in _alive(self._holders[k]) for k in member.keys)
        for key, holders in self._holders.items():
            assert all(key in m.keys for m in _all(holders)), key
        assert self._members.keys() == self._seen.keys()


def _all(holders: Holders) -> Iterable[Member]:
    return holders if isinstance(holders, tuple) else (holders,)


def _alive(holders: Holders) -> list[Member]:
    return [m for m in _all(holders) if m.alive]
