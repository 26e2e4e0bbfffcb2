"""What there is, removal, replicas and their moves between messengers."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence

from moonpool.errors import ConfigError, MoonpoolError, NotFound
from moonpool.integrations.mooncake_api.codes import Code, coded, coded_each, otherwise, refused
from moonpool.integrations.mooncake_api.data import Data
from moonpool.integrations.mooncake_api.descriptors import QueryTaskResponse, ReplicaDescriptor, task_response
from moonpool.integrations.mooncake_api.keys import usable
from moonpool.types import Removed

TaskId = tuple[int, int]
_TASKS_KEPT = 10_000
_REMOVED = {Removed.REMOVED: 0, Removed.MISSING: int(Code.NOT_FOUND), Removed.PINNED: int(Code.PINNED)}


class Manage(Data):
    def __init__(self) -> None:
        super().__init__()
        self._tasks: OrderedDict[TaskId, str] = OrderedDict()
        self._task_lock = threading.Lock()

    # -- what there is

    @coded
    def is_exist(self, key: str) -> int:
        """1 or 0, negative if nobody can say. Protects nothing from eviction."""
        return self._exist([key])[0]

    @coded_each
    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        return self._exist(keys)

    def _exist(self, keys: Sequence[str]) -> list[int]:
        pool = self.pool
        if all(map(usable, keys)):
            return [int(found) for found in pool.batch_is_exist(keys)]
        present = self._present(keys)
        found = dict(zip(present, pool.batch_is_exist(present), strict=True))
        return [int(found.get(key, False)) for key in keys]

    @coded
    def get_size(self, key: str) -> int:
        """Bytes; -704 missing, or why nobody can say."""
        size = self.pool.sizes([key])[0] if usable(key) else None
        return int(Code.NOT_FOUND) if size is None else size

    # -- removal

    @coded
    def remove(self, key: str, force: bool = False) -> int:
        """0, -704 missing, -706 hard-pinned and not forced. Who is reading it keeps its bytes."""
        return self._remove([key], force)[0]

    @coded_each
    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        return self._remove(keys, force)

    def _remove(self, keys: Sequence[str], force: bool) -> list[int]:
        present = self._present(keys)
        removed = dict(zip(present, self.pool.batch_remove(present, force=force), strict=True))
        return [_REMOVED[removed.get(key, Removed.MISSING)] for key in keys]

    @coded
    def remove_all(self, force: bool = False) -> int:
        """How many objects went: all of this tenant, but hard-pinned ones only if forced."""
        return self.pool.remove_all(force=force)

    @coded
    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """How many objects went whose key contains a match; -600 for a pattern that is none."""
        return self.pool.remove_by_regex(regex_pattern, force=force)

    # -- replicas

    @otherwise(list)
    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """The readable replicas; [] if the key is missing."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Missing keys do not appear."""
        try:
            present = self._present(keys)
            found = zip(present, self.pool.replicas(present), strict=True)
            return {key: [ReplicaDescriptor.of(r) for r in replicas] for key, replicas in found if replicas}
        except MoonpoolError as e:
            refused("batch_get_replica_desc", e)
            return {}

    @otherwise(list)
    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Remove all replicas, or those on one segment. The keys of which something was removed."""
        present = self._present(keys)
        removed = self.pool.batch_remove(present, messenger=segment_name)
        return [key for key, outcome in zip(present, removed, strict=True) if outcome]

    # -- tasks

    def create_copy_task(self, key: str, targets: Sequence[str]) -> tuple[TaskId, int]:
        """Start copying the object to these segments. ((hi, lo), 0), or ((0, 0), -704 missing, -600 unknown segment)."""
        try:
            self._check_segments(targets)
            return self._keep(self.pool.copy(key, list(targets))), 0
        except MoonpoolError as e:
            return (0, 0), refused("create_copy_task", e)

    def create_move_task(self, key: str, source: str, target: str) -> tuple[TaskId, int]:
        """Start moving one replica. Codes as for a copy; -600 also for a source that is the target."""
        try:
            self._check_segments([source, target])
            if source == target:
                raise ConfigError("source and target are the same segment", key=source)
            return self._keep(self.pool.move(key, target, source=source)), 0
        except MoonpoolError as e:
            return (0, 0), refused("create_move_task", e)

    def query_task(self, task_id: TaskId) -> tuple[QueryTaskResponse | None, int]:
        """How far it is. (None, -1400) for a task that this store did not start, or that was forgotten."""
        with self._task_lock:
            name = self._tasks.get((task_id[0], task_id[1]))
        try:
            if name is None:
                return None, int(Code.TASK_NOT_FOUND)
            return task_response((task_id[0], task_id[1]), self.pool.task(name)), 0
        except NotFound:
            return None, int(Code.TASK_NOT_FOUND)
        except MoonpoolError as e:
            return None, refused("query_task", e)

    def _check_segments(self, names: Sequence[str]) -> None:
        known = {m.name for m in self.pool.messengers()}
        for name in names:
            if name not in known:
                raise ConfigError("no such segment", key=name, have=", ".join(sorted(known)) or "none")

    def _keep(self, name: str) -> TaskId:
        """The pair of 64-bit numbers that callers know the task by."""
        digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
        pair = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")
        with self._task_lock:
            self._tasks[pair] = name
            if len(self._tasks) > _TASKS_KEPT:
                self._tasks.popitem(last=False)
        return pair
