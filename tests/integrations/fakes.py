"""A pool in a dictionary: several messengers, replicas, pins and tasks without processes, sockets or shared memory."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from itertools import count

from moonpool.errors import ConfigError, KeyBusy, LeaseExpired, MoonpoolError, NoSpace, NotFound, PoolClosed
from moonpool.keys import PageKey
from moonpool.store.base import EventStream, KVPool, Match, ReadLease, Reservation
from moonpool.types import (
    MessengerInfo,
    Pin,
    PoolStats,
    Put,
    PutOptions,
    PutOutcome,
    Removed,
    Replica,
    TaskStatus,
)


class FakeReservation(Reservation):
    def __init__(self, key: str, size: int, homes: list[str], options: PutOptions) -> None:
        self.key, self.homes, self.options = key, homes, options
        self._view = memoryview(bytearray(size))

    @property
    def view(self) -> memoryview:
        return self._view


class FakeLease(ReadLease):
    def __init__(self, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        self.keys = tuple(keys)
        self.views = tuple(None if v is None else memoryview(v) for v in values)
        self.closed = False

    def close(self) -> None:
        self.closed = True
        self.views = (None,) * len(self.keys)


class FakeCluster:
    """What the messengers hold: name → key → (bytes, pin). `capacity` is each one's bytes; `failure` is raised by every call."""

    def __init__(self, *names: str, capacity: int = 1 << 20) -> None:
        self.capacity = capacity
        self.held: dict[str, dict[str, tuple[bytes, Pin]]] = {name: {} for name in names}
        self.tasks: dict[str, TaskStatus] = {}
        self.reserved: set[str] = set()
        self.leases: list[FakeLease] = []
        self.seen: list[PutOptions] = []
        self.lock = threading.RLock()
        self.ids = count(1)
        self.failure: MoonpoolError | None = None

    def holders(self, key: str) -> list[str]:
        return [name for name, objects in self.held.items() if key in objects]


class FakePool(KVPool):
    """One client of the cluster; `home` is where it puts what has no preference."""

    def __init__(self, cluster: FakeCluster, home: str = "") -> None:
        self.cluster, self.home = cluster, home
        self.closed = False

    def _enter(self) -> FakeCluster:
        if self.closed:
            raise PoolClosed("the pool is closed")
        if self.cluster.failure:
            raise self.cluster.failure
        return self.cluster

    def reserve(
        self, items: Sequence[tuple[str, int]], options: PutOptions = PutOptions()
    ) -> list[Reservation | Put | MoonpoolError]:
        c = self._enter()
        with c.lock:
            c.seen.append(options)
            return [self._reserve(c, key, size, options) for key, size in items]

    def _reserve(self, c: FakeCluster, key: str, size: int, options: PutOptions) -> Reservation | Put | MoonpoolError:
        if c.holders(key) and not options.replace:
            return Put.EXISTED
        if key in c.reserved:
            return KeyBusy("another writer", key=key)
        order = dict.fromkeys([*options.preferred, self.home, *c.held])
        used = {n: sum(len(v) for v, _ in o.values()) for n, o in c.held.items()}
        homes = [n for n in order if n in c.held and used[n] + size <= c.capacity][: options.replicas]
        if not homes:
            return NoSpace("full", key=key)
        c.reserved.add(key)
        return FakeReservation(key, size, homes, options)

    def commit(self, reservations: Sequence[Reservation]) -> list[PutOutcome]:
        c = self._enter()
        results: list[PutOutcome] = []
        with c.lock:
            for r in reservations:
                assert isinstance(r, FakeReservation)
                if r.key not in c.reserved:
                    results.append(LeaseExpired("too late", key=r.key))
                    continue
                c.reserved.discard(r.key)
                for objects in c.held.values():
                    objects.pop(r.key, None)
                for name in r.homes:
                    c.held[name][r.key] = (bytes(r.view), r.options.pin)
                r.view.release()
                results.append(Put.STORED)
        return results

    def revoke(self, reservations: Sequence[Reservation]) -> None:
        with self._enter().lock:
            self.cluster.reserved.difference_update(r.key for r in reservations)

    def open_read(self, keys: Sequence[str]) -> ReadLease:
        c = self._enter()
        with c.lock:
            lease = FakeLease(keys, [next((c.held[n][k][0] for n in c.holders(k)), None) for k in keys])
            c.leases.append(lease)
            return lease

    def lookup(self, keys: Sequence[PageKey], origins: Sequence[str] = ()) -> list[Match | None]:
        return [Match(k.text, False) if self._enter().holders(k.text) else None for k in keys]

    def batch_is_exist(self, keys: Sequence[str]) -> list[bool]:
        return [bool(self._enter().holders(k)) for k in keys]

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        c = self._enter()
        return [next((len(c.held[n][k][0]) for n in c.holders(k)), None) for k in keys]

    def replicas(self, keys: Sequence[str]) -> list[list[Replica]]:
        c = self._enter()
        return [
            [Replica(n, f"/{n}", len(c.held[n][k][0]), "memory", c.held[n][k][1]) for n in c.holders(k)] for k in keys
        ]

    def batch_remove(self, keys: Sequence[str], *, force: bool = False, messenger: str = "") -> list[Removed]:
        c = self._enter()
        with c.lock:
            return [self._remove(c, key, force, messenger) for key in keys]

    def _remove(self, c: FakeCluster, key: str, force: bool, messenger: str) -> Removed:
        homes = [n for n in c.holders(key) if messenger in ("", n)]
        if not force and any(c.held[n][key][1] is Pin.HARD for n in homes):
            return Removed.PINNED
        for n in homes:
            del c.held[n][key]
        return Removed.REMOVED if homes else Removed.MISSING

    def keys(self) -> Iterator[str]:
        return iter(sorted({k for objects in self._enter().held.values() for k in objects}))

    def query_by_regex(self, pattern: str) -> list[str]:
        try:
            return [k for k in self.keys() if re.search(pattern, k)]
        except re.error as e:
            raise ConfigError("bad pattern", key=pattern, have=str(e)) from e

    def remove_by_regex(self, pattern: str, *, force: bool = False) -> int:
        return sum(map(bool, self.batch_remove(self.query_by_regex(pattern), force=force)))

    def remove_all(self, *, force: bool = False) -> int:
        return sum(map(bool, self.batch_remove(list(self.keys()), force=force)))

    def copy(self, key: str, targets: Sequence[str], *, source: str = "") -> str:
        c = self._enter()
        with c.lock:
            found = [n for n in c.holders(key) if source in ("", n)]
            if not found:
                raise NotFound("no such object", key=key)
            for target in targets:
                c.held[target][key] = c.held[found[0]][key]
            return self._task("copy", key, found[0], tuple(targets))

    def move(self, key: str, target: str, *, source: str = "") -> str:
        task = self.copy(key, [target], source=source)
        self.cluster.held[self.cluster.tasks[task].source].pop(key)
        return self._task("move", key, self.cluster.tasks[task].source, (target,))

    def _task(self, kind: str, key: str, source: str, targets: tuple[str, ...]) -> str:
        name = f"task-{next(self.cluster.ids)}"
        self.cluster.tasks[name] = TaskStatus(
            id=name, kind="copy" if kind == "copy" else "move", key=key, source=source, targets=targets, state="done"
        )
        return name

    def task(self, task: str) -> TaskStatus:
        if task not in self._enter().tasks:
            raise NotFound("no such task", key=task)
        return self.cluster.tasks[task]

    def messengers(self) -> list[MessengerInfo]:
        return [MessengerInfo(name=n, socket=f"/{n}", capacity=self.cluster.capacity) for n in self._enter().held]

    def subscribe(self, owners: Sequence[str], capacity: int = 4096) -> EventStream:
        raise NotImplementedError

    def hint(self, keys: Sequence[PageKey]) -> None: ...

    def get_c2c_config(self) -> bytes:
        return b""

    def stats(self) -> PoolStats:
        objects = [v for o in self._enter().held.values() for v, _ in o.values()]
        return PoolStats(objects=len(objects), used=sum(map(len, objects)))

    def close(self) -> None:
        self.closed = True
