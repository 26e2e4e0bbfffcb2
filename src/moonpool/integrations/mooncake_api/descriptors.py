"""What the peer's calls return about replicas and tasks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import IntEnum

from moonpool import types as t


class ReplicaStatus(IntEnum):
    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class TaskType(IntEnum):
    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class TaskStatus(IntEnum):
    PENDING = 0
    PROCESSING = 1
    FAILED = 2
    SUCCESS = 3


@dataclass(slots=True)
class Descriptor:
    """Where a replica lies: `transport_endpoint` is its segment's name, `buffer_address` the offset in the segment."""

    size: int = 0
    buffer_address: int = 0
    transport_endpoint: str = ""


@dataclass(frozen=True, slots=True)
class MemoryDescriptor:
    buffer_descriptor: Descriptor


@dataclass(frozen=True, slots=True)
class DiskDescriptor:
    """`file_path` names the messenger whose disk it is; the file itself is that messenger's own business."""

    file_path: str
    object_size: int


@dataclass(frozen=True, slots=True)
class ReplicaDescriptor:
    """One readable replica. Raises RuntimeError where a descriptor of another tier is asked for, as the peer does."""

    status: ReplicaStatus
    _replica: t.Replica

    @staticmethod
    def of(replica: t.Replica) -> ReplicaDescriptor:
        return ReplicaDescriptor(ReplicaStatus.COMPLETE, replica)

    def is_memory_replica(self) -> bool:
        return self._replica.tier == "memory"

    def is_disk_replica(self) -> bool:
        """On a file system that all share: Moonpool has none."""
        return False

    def is_local_disk_replica(self) -> bool:
        return self._replica.tier == "disk"

    def get_memory_descriptor(self) -> MemoryDescriptor:
        if not self.is_memory_replica():
            raise RuntimeError("not a memory replica")
        r = self._replica
        return MemoryDescriptor(Descriptor(r.size, r.offset, r.messenger))

    def get_disk_descriptor(self) -> DiskDescriptor:
        if self.is_memory_replica():
            raise RuntimeError("not a disk replica")
        return DiskDescriptor(self._replica.messenger, self._replica.size)


@dataclass(slots=True)
class QueryTaskResponse:
    id: tuple[int, int] = (0, 0)
    type: TaskType = TaskType.REPLICA_COPY
    status: TaskStatus = TaskStatus.PENDING
    created_at_ms_epoch: int = 0
    last_updated_at_ms_epoch: int = field(default_factory=lambda: int(time.time() * 1000))
    assigned_client: tuple[int, int] = (0, 0)
    message: str = ""


_STATES = {
    "pending": TaskStatus.PENDING,
    "running": TaskStatus.PROCESSING,
    "done": TaskStatus.SUCCESS,
    "failed": TaskStatus.FAILED,
}


def task_response(pair: tuple[int, int], status: t.TaskStatus) -> QueryTaskResponse:
    kind = TaskType.REPLICA_COPY if status.kind == "copy" else TaskType.REPLICA_MOVE
    message = status.error or f"{status.done} of {status.total} B"
    return QueryTaskResponse(id=pair, type=kind, status=_STATES[status.state], message=message)
