"""A pool that has no messenger yet, as a client sees it that came first: nothing is there and nothing can be put."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moonpool.errors import MoonpoolError, NotEnoughMessengers, NotFound
from moonpool.keys import PageKey
from moonpool.store.base import PLAIN, EventStream, KVPool, Match, ReadLease, Reservation
from moonpool.types import MessengerInfo, PoolStats, Put, PutOptions, PutOutcome, Removed, Replica, TaskStatus


class EmptyLease(ReadLease):
    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        self.views = (None,) * len(keys)

    def close(self) -> None: ...


class EmptyPool(KVPool):
    def reserve(
        self, items: Sequence[tuple[str, int]], options: PutOptions = PLAIN
    ) -> list[Reservation | Put | MoonpoolError]:
        return [NotEnoughMessengers("the pool has no messenger", key=key, fix="Start one.") for key, _ in items]

    def commit(self, reservations: Sequence[Reservation]) -> list[PutOutcome]:
        return []

    def revoke(self, reservations: Sequence[Reservation]) -> None: ...

    def open_read(self, keys: Sequence[str]) -> ReadLease:
        return EmptyLease(keys)

    def lookup(self, keys: Sequence[PageKey], origins: Sequence[str] = ()) -> list[Match | None]:
        return [None] * len(keys)

    def batch_is_exist(self, keys: Sequence[str]) -> list[bool]:
        return [False] * len(keys)

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        return [None] * len(keys)

    def replicas(self, keys: Sequence[str]) -> list[list[Replica]]:
        return [[] for _ in keys]

    def batch_remove(self, keys: Sequence[str], *, force: bool = False, messenger: str = "") -> list[Removed]:
        return [Removed.MISSING] * len(keys)

    def keys(self) -> Iterator[str]:
        return iter(())

    def copy(self, key: str, targets: Sequence[str], *, source: str = "") -> str:
        raise NotFound("no such object", key=key)

    def move(self, key: str, target: str, *, source: str = "") -> str:
        raise NotFound("no such object", key=key)

    def task(self, task: str) -> TaskStatus:
        raise NotFound("no such task", key=task)

    def messengers(self) -> list[MessengerInfo]:
        return []

    def subscribe(self, owners: Sequence[str], capacity: int = 4096) -> EventStream:
        raise NotEnoughMessengers("the pool has no messenger")

    def hint(self, keys: Sequence[PageKey]) -> None: ...

    def get_c2c_config(self) -> bytes:
        return b""

    def stats(self) -> PoolStats:
        return PoolStats()

    def close(self) -> None: ...
