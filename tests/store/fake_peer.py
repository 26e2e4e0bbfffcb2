"""A stand-in for `mooncake.store.MooncakeDistributedStore`: objects in a dict, bytes by raw pointers, and faults on demand."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from moonpool.store.mooncake.admin import Admin, PeerSegment

MODULE = SimpleNamespace(ReplicateConfig=SimpleNamespace, SoftPinAction=SimpleNamespace(ENABLE="enable"))
"""What the pool uses of the peer's module."""


class Replica:
    """What `batch_get_replica_desc` gives of an object in memory, or elsewhere (`tier="local disk"`)."""

    status = SimpleNamespace(name="COMPLETE")

    def __init__(self, size: int, tier: str = "memory") -> None:
        self._size, self._tier = size, tier

    def is_memory_replica(self) -> bool:
        return self._tier == "memory"

    def is_disk_replica(self) -> bool:
        return self._tier == "disk"

    def is_local_disk_replica(self) -> bool:
        return self._tier == "local disk"

    def get_memory_descriptor(self) -> Any:
        place = SimpleNamespace(size=self._size, transport_endpoint="fake:1", buffer_address=4096)
        return SimpleNamespace(buffer_descriptor=place)

    def get_disk_descriptor(self) -> Any:
        return SimpleNamespace(object_size=self._size)


@dataclass
class FakeStore:
    """The real one kills the interpreter when it is used while it is not open; this one fails the test."""

    objects: dict[str, bytes] = field(default_factory=dict)
    tiers: dict[str, str] = field(default_factory=dict)
    leased: set[str] = field(default_factory=set)
    code: int = 0
    """Negative: every call fails with it, as with a master that is away."""
    short: int = 0
    """Bytes that every get lacks."""
    gate: threading.Event | None = None
    """While it is not set, calls do not return."""
    registered: dict[int, int] = field(default_factory=dict)
    register_code: int = 0
    calls: list[str] = field(default_factory=list)
    configs: list[Any] = field(default_factory=list)
    tasks: dict[tuple[int, int], Any] = field(default_factory=dict)
    closed: bool = False

    def _enter(self, name: str) -> None:
        assert not self.closed, f"{name} after close: the real store would have killed the interpreter"
        self.calls.append(name)
        if self.gate:
            assert self.gate.wait(10)
            assert not self.closed, f"closed under {name}: the real store would have killed the interpreter"

    def register_buffer(self, ptr: int, size: int, /) -> int:
        self._enter("register_buffer")
        self.registered[ptr] = size
        return self.register_code

    def unregister_buffer(self, ptr: int, /) -> int:
        self._enter("unregister_buffer")
        return 0 if self.registered.pop(ptr, None) else -600

    def batch_is_exist(self, keys: list[str], /) -> list[int]:
        self._enter("batch_is_exist")
        return [self.code or int(k in self.objects) for k in keys]

    def batch_get_replica_desc(self, keys: list[str], /) -> dict[str, list[Any]]:
        self._enter("batch_get_replica_desc")
        if self.code:
            return {}
        return {k: [Replica(len(self.objects[k]), self.tiers.get(k, "memory"))] for k in keys if k in self.objects}

    def get_size(self, key: str, /) -> int:
        self._enter("get_size")
        return self.code or (len(self.objects[key]) if key in self.objects else -704)

    def batch_put_from(self, keys: list[str], ptrs: list[int], sizes: list[int], config: Any = None, /) -> list[int]:
        self._enter("batch_put_from")
        self.configs.append(config)
        for key, ptr, size in zip(keys, ptrs, sizes, strict=True):
            if not self.code:
                self._check(ptr, size)
                self.objects.setdefault(key, ctypes.string_at(ptr, size))
        return [self.code] * len(keys)

    def batch_get_into(self, keys: list[str], ptrs: list[int], sizes: list[int], /) -> list[int]:
        self._enter("batch_get_into")
        codes = []
        for key, ptr, size in zip(keys, ptrs, sizes, strict=True):
            data = self.objects.get(key, b"")[: size - self.short]
            self._check(ptr, size)
            if not self.code:
                ctypes.memmove(ptr, data, len(data))
            codes.append(self.code or (len(data) if key in self.objects else -704))
        return codes

    def _check(self, ptr: int, size: int) -> None:
        inside = any(start <= ptr and ptr + size <= start + length for start, length in self.registered.items())
        assert inside, "bytes outside of registered memory"

    def batch_remove(self, keys: list[str], force: bool = False, /) -> list[int]:
        self._enter("batch_remove")
        codes = []
        for key in keys:
            if self.code or (key in self.leased and not force):
                codes.append(self.code or -706)
            else:
                codes.append(0 if self.objects.pop(key, None) is not None else -704)
        return codes

    def batch_replica_clear(self, keys: list[str], segment: str, /) -> list[str]:
        self._enter("batch_replica_clear")
        free = [k for k in keys if k in self.objects and k not in self.leased and segment == "fake:1"]
        return [] if self.code else [k for k in free if self.objects.pop(k)]

    def remove_all(self, force: bool = False, /) -> int:
        self._enter("remove_all")
        going = [k for k in self.objects if force or k not in self.leased]
        return self.code or len([self.objects.pop(k) for k in going])

    def create_copy_task(self, key: str, targets: list[str], /) -> tuple[tuple[int, int], int]:
        return self._task("REPLICA_COPY", key, targets)

    def create_move_task(self, key: str, source: str, target: str, /) -> tuple[tuple[int, int], int]:
        return self._task("REPLICA_MOVE", key, [source, target])

    def _task(self, kind: str, key: str, places: list[str]) -> tuple[tuple[int, int], int]:
        self._enter(kind)
        if key not in self.objects or any(not p.startswith("fake:") for p in places):
            return (0, 0), -704 if key not in self.objects else -600
        number = (1, len(self.tasks))
        self.tasks[number] = SimpleNamespace(
            type=SimpleNamespace(name=kind), status=SimpleNamespace(name="PENDING"), message=""
        )
        return number, 0

    def query_task(self, task: tuple[int, int], /) -> tuple[Any, int]:
        self._enter("query_task")
        return (self.tasks[task], 0) if task in self.tasks else (None, -1400)

    def close(self) -> int:
        self._enter("close")
        self.closed = True
        return 0


class FakeAdmin(Admin):
    """The admin port of the master behind a `FakeStore`, which has one segment."""

    def __init__(self, store: FakeStore) -> None:
        super().__init__("fake:9003", 1.0)
        self._store = store

    def figures(self) -> dict[str, int]:
        return {"master_key_count": len(self._store.objects)}

    def segments(self) -> list[PeerSegment]:
        used = sum(map(len, self._store.objects.values()))
        return [PeerSegment("fake:1", "fake:1", "0x0", 1 << 20, used, "OK")]

    def all_keys(self) -> Iterator[str]:
        yield from self._store.objects
