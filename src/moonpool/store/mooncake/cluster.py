"""The cluster behind the pool: its segments as messengers, replicas, tasks, the list of keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from moonpool.errors import ConfigError, NotFound
from moonpool.store.mooncake.admin import Admin, PeerSegment
from moonpool.store.mooncake.codes import INVALID_PARAMS, OBJECT_NOT_FOUND, error_of
from moonpool.store.mooncake.limits import Cannot
from moonpool.store.mooncake.peer import PeerStore
from moonpool.types import MessengerInfo, Removed, Replica, TaskStatus
from moonpool.wire.messages import MAX_BATCH

_TASKS_KEPT = 4096
_GONE = (OBJECT_NOT_FOUND, *range(-1099, -899))
"""Codes of what is not there, or whose master does not answer: a miss in either case."""


class Cluster:
    """`admin` is None where the config names no `admin_address`; what needs it raises ConfigError then."""

    def __init__(self, peer: PeerStore, admin: Admin | None) -> None:
        self._peer, self._admin = peer, admin
        self._tasks: OrderedDict[str, TaskStatus] = OrderedDict()

    @property
    def admin(self) -> Admin:
        if self._admin is None:
            raise ConfigError("only the master's admin port tells this", key="admin_address", need="its host:port")
        return self._admin

    def figures(self) -> dict[str, int]:
        """Empty without an admin port."""
        return self._admin.figures() if self._admin else {}

    def keys(self) -> Iterator[str]:
        return self.admin.all_keys()

    def messengers(self) -> list[MessengerInfo]:
        """The segments. The peer does not tell how many objects one holds."""
        return [
            MessengerInfo(
                name=s.segment_name,
                socket="",
                listen=s.te_endpoint,
                host=s.te_endpoint.rpartition(":")[0],
                capacity=s.size_bytes,
                used=s.allocator_used_bytes,
                objects=0,
                draining=s.status != "OK",
            )
            for s in self.admin.segments()
        ]

    # -- objects

    def probe(self, keys: Iterable[str]) -> dict[str, int]:
        """1 = there, 0 = not, negative = the peer's error. One RPC for each `MAX_BATCH` keys."""
        unique = list(dict.fromkeys(keys))
        there: dict[str, int] = {}
        for start in range(0, len(unique), MAX_BATCH):
            part = unique[start : start + MAX_BATCH]
            with self._peer.use() as store:
                there.update(zip(part, store.batch_is_exist(part), strict=True))
        return there

    def sizes(self, keys: Sequence[str]) -> dict[str, int]:
        """Bytes of each object that is there, in the order of `keys`."""
        if not keys:
            return {}
        with self._peer.use() as store:
            found = store.batch_get_replica_desc(list(keys))
            sizes = {k: _size(found[k]) or store.get_size(k) for k in keys if found.get(k)}
        return {k: s for k, s in sizes.items() if s > 0}

    def replicas(self, keys: Sequence[str]) -> list[list[Replica]]:
        if not keys:
            return []
        with self._peer.use() as store:
            found = store.batch_get_replica_desc(list(keys))
        segments = self._admin.segments() if self._admin else []
        return [[_replica(r, segments) for r in found.get(k, [])] for k in keys]

    def remove(self, keys: Sequence[str], *, force: bool) -> list[Removed]:
        with self._peer.use() as store:
            codes = store.batch_remove(list(keys), force)
        return [Removed.REMOVED if c == 0 else Removed.MISSING if c in _GONE else Removed.PINNED for c in codes]

    def remove_replicas(self, keys: Sequence[str], messenger: str, *, force: bool) -> list[Removed]:
        """The peer says only which it removed. Asking for one of the others would renew its lease, so the list of keys has to tell
        those that are held (or have their copies elsewhere) from those that are not there."""
        if force:
            raise Cannot.FORCE_ONE_REPLICA.error(messenger)
        if messenger not in (s.segment_name for s in self.admin.segments()):
            raise NotFound("no such messenger", key=messenger)
        with self._peer.use() as store:
            cleared = set(store.batch_replica_clear(list(keys), messenger))
        left = set(keys) - cleared
        held = left.intersection(self.keys()) if left else left
        return [Removed.REMOVED if k in cleared else Removed.PINNED if k in held else Removed.MISSING for k in keys]

    def remove_all(self, *, force: bool) -> int:
        with self._peer.use() as store:
            count = store.remove_all(force)
        if count < 0:
            raise error_of(count)
        return count

    # -- copying replicas: clients of the peer do it, when they next ask the master for work

    def copy(self, key: str, targets: Sequence[str], source: str) -> str:
        if source:
            raise Cannot.CHOOSE_COPY_SOURCE.error(key)
        with self._peer.use() as store:
            size = store.get_size(key)
            task, code = store.create_copy_task(key, list(targets))
        return self._begun(task, code, _task("copy", key, "", targets, size))

    def move(self, key: str, target: str, source: str) -> str:
        source = source or self._holder(key)
        with self._peer.use() as store:
            size = store.get_size(key)
            task, code = store.create_move_task(key, source, target)
        return self._begun(task, code, _task("move", key, source, [target], size))

    def _holder(self, key: str) -> str:
        self.admin  # noqa: B018 - only it knows the names of segments
        [replicas] = self.replicas([key])
        if not replicas:
            raise NotFound("no such object", key=key)
        return replicas[0].messenger

    def _begun(self, task: tuple[int, int], code: int, status: TaskStatus) -> str:
        if code == INVALID_PARAMS:
            places = ", ".join((status.source, *status.targets)).lstrip(", ")
            raise NotFound("no such messenger, or no replica there to move", key=status.key, have=places)
        if code:
            raise error_of(code, status.key)
        name = f"{task[0]:x}-{task[1]:x}"
        self._tasks[name] = status
        while len(self._tasks) > _TASKS_KEPT:
            self._tasks.popitem(last=False)
        return name

    def task(self, name: str) -> TaskStatus:
        """Key, places and bytes are known of tasks that this client began."""
        high, _, low = name.partition("-")
        try:
            number = int(high, 16), int(low, 16)
        except ValueError:
            raise NotFound("not a task", key=name) from None
        with self._peer.use() as store:
            reply, code = store.query_task(number)
        if code:
            raise error_of(code, name)
        begun = self._tasks.get(name) or _foreign(reply)
        return _progress(name, begun, reply)


def _task(kind: Literal["copy", "move"], key: str, source: str, targets: Sequence[str], size: int) -> TaskStatus:
    return TaskStatus(
        id="", kind=kind, key=key, source=source, targets=tuple(targets), state="pending", total=max(size, 0)
    )


def _foreign(reply: Any) -> TaskStatus:
    return _task("move" if reply.type.name == "REPLICA_MOVE" else "copy", "", "", (), 0)


def _progress(name: str, begun: TaskStatus, reply: Any) -> TaskStatus:
    change = msgspec.structs.replace
    match reply.status.name:
        case "SUCCESS":
            return change(begun, id=name, state="done", done=begun.total)
        case "FAILED":
            return change(begun, id=name, state="failed", error=reply.message)
        case "PROCESSING":
            return change(begun, id=name, state="running")
        case _:
            return change(begun, id=name)


def _size(replicas: Sequence[Any]) -> int:
    """Bytes of an object by the peer's replica descriptors; 0 if none of them tells (a replica on another node's disk)."""
    for replica in replicas:
        if replica.is_memory_replica():
            return int(replica.get_memory_descriptor().buffer_descriptor.size)
        if replica.is_disk_replica():
            return int(replica.get_disk_descriptor().object_size)
    return 0


def _replica(replica: Any, segments: Sequence[PeerSegment]) -> Replica:
    """The peer's client tells no pins, and of a replica on disk no place. Without an admin port a segment is known by its
    transfer engine's address."""
    if not replica.is_memory_replica():
        return Replica(messenger="", address="", size=_size([replica]), tier="disk")
    place = replica.get_memory_descriptor().buffer_descriptor
    name, offset = place.transport_endpoint, 0
    for s in segments:
        if s.te_endpoint == place.transport_endpoint and s.base <= place.buffer_address < s.base + s.size_bytes:
            name, offset = s.segment_name, place.buffer_address - s.base
    return Replica(
        messenger=name,
        address=place.transport_endpoint,
        size=int(place.size),
        tier="memory",
        offset=offset,
    )
