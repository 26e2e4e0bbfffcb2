"""A store that keeps its objects in a dict, with the raw calls that the tensor calls need."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from moonpool.integrations.mooncake_api.buffers import BufferHandle
from moonpool.integrations.mooncake_api.tensors import TensorMethods
from moonpool.types import BufferLike


class FakeStore(TensorMethods):
    """Answers with the peer's codes. `groups` notes the group of each key that was written; `writes` counts the calls."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.groups: dict[str, str] = {}
        self.writes = 0
        self.full: set[str] = set()
        """Keys for which there is no room."""

    def upsert_parts(self, key: str, *parts: BufferLike, config: Any = None) -> int:
        return self._write(key, b"".join(bytes(p) for p in parts), config, 0, replace=True)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: Any = None,
    ) -> list[int]:
        values = [
            b"".join(ctypes.string_at(p, n) for p, n in zip(ptrs, sizes, strict=True))
            for ptrs, sizes in zip(all_buffer_ptrs, all_sizes, strict=True)
        ]
        return [self._write(k, v, config, i) for i, (k, v) in enumerate(zip(keys, values, strict=True))]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        return [self._handle(self.objects[k]) if k in self.objects else None for k in keys]

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        return [self._get_into(k, p, n) for k, p, n in zip(keys, buffer_ptrs, sizes, strict=True)]

    def _write(self, key: str, value: bytes, config: Any, index: int, *, replace: bool = False) -> int:
        self.writes += 1
        if not key or not value:
            return -600
        if key in self.full:
            return -200
        if replace or key not in self.objects:
            self.objects[key] = value
        groups = getattr(config, "group_ids", None)
        if groups:
            self.groups[key] = groups[index]
        return 0

    def _handle(self, value: bytes) -> BufferHandle:
        handle = BufferHandle.allocate(len(value))
        memoryview(handle)[:] = value
        return handle

    def _get_into(self, key: str, ptr: int, size: int) -> int:
        if key not in self.objects:
            return -704
        value = self.objects[key]
        if len(value) > size:
            return -600
        ctypes.memmove(ptr, value, len(value))
        return len(value)
