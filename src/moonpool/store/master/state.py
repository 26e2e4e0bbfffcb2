"""The index of the pool: who is alive and who holds what. Pure, and allowed to be lost: messengers tell it everything again.

It never says where in a segment an object lies, so an index that is wrong costs a miss and never a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.clock import Clock
from moonpool.errors import NoSpace, NotFound

MAX_MEMBERS = 1024
"""Each holds at most its own `max_objects` keys, so the index is bounded too."""


@dataclass(slots=True)
class Member:
    name: str
    socket: str
    generation: str
    seen: float
    keys: set[str] = field(default_factory=set)


class MasterState:
    """Every method is one atomic step; the caller locks."""

    def __init__(self, clock: Clock, *, expiry_s: float = 10.0) -> None:
        self._clock, self._expiry_s = clock, expiry_s
        self._members: dict[str, Member] = {}
        self._holders: dict[str, set[str]] = {}
        self._checked = clock.now()

    def register(self, name: str, socket: str, generation: str) -> None:
        """A messenger joins with an empty list of keys; one of the same name that was there before is replaced.

        Raises NoSpace past MAX_MEMBERS.
        """
        self._forget(name)
        if len(self._members) >= MAX_MEMBERS:
            raise NoSpace("too many messengers", key=name, need=f"<= {MAX_MEMBERS}", have=str(len(self._members)))
        self._members[name] = Member(name, socket, generation, self._clock.now())

    def heartbeat(self, name: str) -> None:
        """Raises NotFound for a messenger that is not known (any more): it must register again."""
        self._member(name).seen = self._clock.now()

    def publish(self, name: str, added: Sequence[str], removed: Sequence[str]) -> None:
        member = self._member(name)
        member.seen = self._clock.now()
        for key in removed:
            self._unhold(key, name)
            member.keys.discard(key)
        for key in added:
            self._holders.setdefault(key, set()).add(name)
            member.keys.add(key)

    def messengers(self) -> list[tuple[str, str]]:
        self._expire()
        return sorted((m.name, m.socket) for m in self._members.values())

    def locate(self, keys: Sequence[str]) -> list[list[str]]:
        self._expire()
        return [sorted(self._holders.get(k, ())) for k in keys]

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
        for member in list(self._members.values()):
            if stalled:
                member.seen = now
            elif now - member.seen > self._expiry_s:
                self._forget(member.name)

    def tick(self) -> None:
        """Call about once a second, so that a stall can be told from silence."""
        self._expire()

    def _forget(self, name: str) -> None:
        member = self._members.pop(name, None)
        for key in member.keys if member else ():
            self._unhold(key, name)

    def _unhold(self, key: str, name: str) -> None:
        holders = self._holders.get(key)
        if holders:
            holders.discard(name)
            if not holders:
                del self._holders[key]

    def check_integrity(self) -> None:
        for name, member in self._members.items():
            assert all(name in self._holders[k] for k in member.keys)
        assert all(h and h <= self._members.keys() for h in self._holders.values())
