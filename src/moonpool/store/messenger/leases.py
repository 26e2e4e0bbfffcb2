"""Who has what open: a pure ledger of sessions, read leases and write reservations.

Each entry belongs to one session and is released exactly once: by its owner, or when the session ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Generic, TypeVar

from moonpool.errors import LeaseExpired, NoSpace

T = TypeVar("T")


@dataclass(slots=True)
class Ledger(Generic[T]):
    """Handles of one kind. Ids are never used twice."""

    limit: int
    """Most entries that one session may hold."""
    _next: int = 1
    _entries: dict[int, tuple[int, T]] = field(default_factory=dict)
    _sessions: dict[int, set[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, session: int, entry: T) -> int:
        """A new id for `entry`. Raises NoSpace if the session holds too many."""
        held = self._sessions.get(session)
        if held is None:
            held = self._sessions[session] = set()
        if len(held) >= self.limit:
            raise NoSpace(
                "session holds too many handles",
                need=f"<= {self.limit}",
                have=str(len(held)),
                fix="Close leases, commit or revoke.",
            )
        key, self._next = self._next, self._next + 1
        self._entries[key] = (session, entry)
        held.add(key)
        return key

    def holds(self, session: int) -> bool:
        return bool(self._sessions.get(session))

    def room(self, session: int, count: int) -> bool:
        """Whether the session may hold `count` more."""
        return len(self._sessions.get(session, ())) + count <= self.limit

    def add_all(self, session: int, entries: Sequence[T]) -> int:
        """The first of as many ids in a row. Raises NoSpace, and adds none then."""
        held = self._sessions.setdefault(session, set())
        if len(held) + len(entries) > self.limit:
            raise NoSpace(
                "session holds too many handles",
                need=f"<= {self.limit}",
                have=str(len(held)),
                fix="Close leases, commit or revoke.",
            )
        first, self._next = self._next, self._next + len(entries)
        held.update(range(first, self._next))
        self._entries.update(zip(range(first, self._next), zip(repeat(session), entries)))  # noqa: B905 - endless
        return first

    def get(self, session: int, key: int) -> T:
        """The entry, still held. Raises LeaseExpired if this session does not hold it (any more)."""
        owner, entry = self._entries.get(key, (None, None))
        if owner != session:
            raise LeaseExpired("no such handle of this session", key=str(key))
        return entry  # type: ignore[return-value]  # an owner was found, so the entry is a T

    def find(self, session: int, key: int) -> T | None:
        """The entry, still held; None if this session does not hold it (any more)."""
        owner, entry = self._entries.get(key, (None, None))
        return entry if owner == session else None

    def take(self, session: int, key: int) -> T:
        """Release: the entry is the caller's now. Raises LeaseExpired if this session does not hold it (any more)."""
        owner, entry = self._entries.get(key, (None, None))
        if owner != session:
            raise LeaseExpired("no such handle of this session", key=str(key), fix="Handles are released once.")
        del self._entries[key]
        self._sessions[session].discard(key)
        return entry  # type: ignore[return-value]  # an owner was found, so the entry is a T

    def take_all(self, session: int, keys: Sequence[int]) -> None:
        """Release what this session holds, all of it, each once."""
        for key in keys:
            del self._entries[key]
        self._sessions[session].difference_update(keys)

    def discard(self, session: int, key: int) -> T | None:
        """Like `take`; None if this session does not hold it (any more)."""
        try:
            return self.take(session, key)
        except LeaseExpired:
            return None

    def entries(self) -> list[T]:
        """All that anybody holds."""
        return [entry for _, entry in self._entries.values()]

    def end(self, session: int) -> list[T]:
        """Release all that the session holds."""
        return [self._entries.pop(key)[1] for key in sorted(self._sessions.pop(session, ()))]
