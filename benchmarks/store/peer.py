"""The real package as a side of the comparison. Runs in an environment where `mooncake` is installed, and without moonpool."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.store.workload import Side, fill


class Peer(Side):
    """Its fastest calls: from and into registered memory."""

    def __init__(self, store: Any, source: np.ndarray, target: np.ndarray) -> None:
        self.store, self.source, self.target = store, source, target
        self._from, self._into = source.ctypes.data, target.ctypes.data
        fill(source)
        target[:] = 1

    @staticmethod
    def setup(master: str, metadata: str, segment: int, local: int, buffer: int, host: str = "127.0.0.1") -> Peer:
        """Its default mode: a client with a segment of `segment` bytes (0: none of its own)."""
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        code = store.setup(host, metadata, segment, local, "tcp", "", master)
        assert code == 0, f"setup: {code}"
        source, target = np.zeros(buffer, dtype=np.uint8), np.zeros(buffer, dtype=np.uint8)
        for array in (source, target) if buffer else ():
            code = store.register_buffer(array.ctypes.data, array.nbytes)
            assert code == 0, f"register_buffer: {code}"
        return Peer(store, source, target)

    @staticmethod
    def dummy(server: str, buffer: int) -> Peer:
        """Its shared-memory mode: buffers come from a pool that the `mooncake_client` process at `server` maps too."""
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        code = store.setup_dummy(4 * buffer, 64 << 20, server)
        assert code == 0, f"setup_dummy: {code}"
        address = store.alloc_from_mem_pool(2 * buffer)
        assert address, "alloc_from_mem_pool gave nothing"
        code = store.register_buffer(address, 2 * buffer)
        assert code == 0, f"register_buffer: {code}"
        both = np.ctypeslib.as_array((ctypes.c_uint8 * (2 * buffer)).from_address(address))
        return Peer(store, both[:buffer], both[buffer:])

    def pieces(self, buffer: np.ndarray, starts: Sequence[int], size: int) -> tuple[list[int], list[int]]:
        base = buffer.ctypes.data
        return [base + s for s in starts], [size] * len(starts)

    def put(self, keys: list[str], pieces: Any) -> None:
        results = self.store.batch_put_from(keys, *pieces)
        assert not any(results), results[:3]

    def get(self, keys: list[str], pieces: Any) -> None:
        results = self.store.batch_get_into(keys, *pieces)
        assert list(results) == pieces[1], results[:3]

    def put_one(self, key: str, start: int, size: int) -> None:
        code = self.store.put_from(key, self._from + start, size)
        assert code == 0, code

    def get_one(self, key: str, start: int, size: int) -> None:
        code = self.store.get_into(key, self._into + start, size)
        assert code == size, code

    def exist(self, keys: list[str]) -> list[bool]:
        return [e == 1 for e in self.store.batch_is_exist(keys)]

    def exist_one(self, key: str) -> bool:
        return bool(self.store.is_exist(key) == 1)

    def clear(self, keys: list[str]) -> None:
        self.store.remove_all(True)

    def close(self) -> None:
        self.store.close()
