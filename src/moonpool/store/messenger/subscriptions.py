"""Who wants to hear of which pages, and what they have not fetched yet. Pure, and bounded: a reader that lags loses the oldest."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from moonpool.errors import LeaseExpired, NoSpace
from moonpool.keys import owner_of
from moonpool.store.messenger.objects import CONVERTED
from moonpool.store.messenger.tenants import bare, tenant_of
from moonpool.types import Hinted, Missed, PoolEvent

MAX_SUBSCRIPTIONS = 64


@dataclass(slots=True)
class Subscription:
    events: deque[PoolEvent]
    dropped: int = 0


class Subscriptions:
    """Not thread-safe; the caller locks. False while there are none."""

    def __init__(self) -> None:
        self._open: dict[int, Subscription] = {}
        self._owners: dict[tuple[str, str], list[Subscription]] = {}
        """By tenant and owner."""
        self._sessions: dict[int, list[int]] = {}
        self._ids = count(1)
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._open)

    def subscribe(self, session: int, owners: Sequence[str], capacity: int, tenant: str = "") -> int:
        """The id of a new one. Raises NoSpace past MAX_SUBSCRIPTIONS."""
        if len(self._open) >= MAX_SUBSCRIPTIONS:
            raise NoSpace("too many subscriptions", need=f"<= {MAX_SUBSCRIPTIONS}", have=str(len(self._open)))
        handle = next(self._ids)
        subscription = Subscription(deque(maxlen=capacity))
        self._open[handle] = subscription
        self._sessions.setdefault(session, []).append(handle)
        for owner in owners:
            self._owners.setdefault((tenant, owner), []).append(subscription)
        return handle

    def emit(self, tenant: str, owner: str, event: PoolEvent) -> None:
        if not self._owners:
            return
        for subscription in self._owners.get((tenant, owner), ()):
            if len(subscription.events) == subscription.events.maxlen:
                subscription.dropped += 1
                self.dropped += 1
            subscription.events.append(event)

    def announce(self, keys: Sequence[str], *, hinted: bool) -> None:
        """That these native pages (full keys) were missed, or will be wanted."""
        if not self._owners:
            return
        for key in keys:
            name = bare(key)
            if (owner := owner_of(name)) and CONVERTED not in name:
                self.emit(tenant_of(key), owner, Hinted(name) if hinted else Missed(name))

    def waiting(self, subscription: int) -> bool:
        """Whether `take` would give something, if only an error."""
        held = self._open.get(subscription)
        return held is None or bool(held.events)

    def take(self, subscription: int, limit: int) -> tuple[list[PoolEvent], int]:
        """Up to `limit` events that are there now, and how many were ever dropped. Raises LeaseExpired."""
        held = self._open.get(subscription)
        if held is None:
            raise LeaseExpired("no such subscription", key=str(subscription))
        events = [held.events.popleft() for _ in range(min(limit, len(held.events)))]
        return events, held.dropped

    def end_session(self, session: int) -> None:
        for handle in self._sessions.pop(session, ()):
            gone = self._open.pop(handle)
            for owner in [o for o, subs in self._owners.items() if gone in subs]:
                self._owners[owner] = [s for s in self._owners[owner] if s is not gone]
                if not self._owners[owner]:
                    del self._owners[owner]
