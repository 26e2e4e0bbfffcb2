"""Moonpool as a side of the comparison, and what only it has: read views, and the copies that bound it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from benchmarks.store.workload import BATCH, Side, fill, keys_of, percentile, timed
from moonpool.errors import MoonpoolError
from moonpool.store.base import KVPool
from moonpool.store.client import PoolClient
from moonpool.store.embedded import EmbeddedPool
from moonpool.transfer.segment import Segment
from moonpool.types import Put
from moonpool.wire.auth import load_security


class Ours(Side):
    failures = (AssertionError, MoonpoolError)

    def __init__(self, pool: KVPool, buffer: int) -> None:
        self.pool = pool
        self.source, self.target = np.zeros(buffer, dtype=np.uint8), np.ones(buffer, dtype=np.uint8)
        fill(self.source)

    @staticmethod
    def embedded(capacity: int, buffer: int) -> Ours:
        return Ours(EmbeddedPool(capacity), buffer)

    @staticmethod
    def client(master: str, messenger: str, buffer: int) -> Ours:
        return Ours(PoolClient.connect(master, messenger=messenger), buffer)

    @staticmethod
    def remote(master: str, messenger: str, secret_file: str, buffer: int) -> Ours:
        """The home is another host: bytes go over TCP."""
        security = load_security(secret_file=secret_file)
        return Ours(PoolClient.connect(master, messenger=messenger, security=security, shared_memory=False), buffer)

    def pieces(self, buffer: np.ndarray, starts: Sequence[int], size: int) -> list[np.ndarray]:
        return [buffer[s : s + size] for s in starts]

    def put(self, keys: list[str], pieces: Any) -> None:
        results = self.pool.batch_put(keys, pieces)
        assert all(r is Put.STORED for r in results), results[0]

    def get(self, keys: list[str], pieces: Any) -> None:
        results = self.pool.batch_get_into(keys, pieces)
        assert results == [len(p) for p in pieces], results[0]

    def put_one(self, key: str, start: int, size: int) -> None:
        assert self.pool.put(key, self.source[start : start + size]) is Put.STORED

    def get_one(self, key: str, start: int, size: int) -> None:
        assert self.pool.get_into(key, self.target[start : start + size]) == size

    def exist(self, keys: list[str]) -> list[bool]:
        return self.pool.batch_is_exist(keys)

    def exist_one(self, key: str) -> bool:
        return self.pool.is_exist(key)

    def clear(self, keys: list[str]) -> None:
        self.pool.batch_remove(keys)

    def close(self) -> None:
        self.pool.close()


def view_times(side: Ours, sizes: Sequence[int], count: int) -> dict[str, float]:
    """Median microseconds to open and close a zero-copy view of one object, per size."""
    found = {}
    for size in sizes:
        keys = keys_of(f"view:{size}", 1)
        side.put_one(keys[0], 0, size)
        found[str(size)] = 1e6 * percentile([timed(partial(_view, side.pool, keys)) for _ in range(count)], 0.5)
        side.clear(keys)
    return found


def _view(pool: KVPool, keys: list[str]) -> None:
    with pool.open_read(keys) as lease:
        assert lease.views[0] is not None


class Copies:
    """Plain copies, piece by piece, between a segment as the pool makes it and the side's own buffers: the best that a pool which
    copies could reach with as many threads."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._segment = Segment.create(side.source.nbytes)
        self._shared = np.frombuffer(self._segment.view, dtype=np.uint8)
        self._shared[:] = 1
        self._helpers = ThreadPoolExecutor()

    def rate(self, size: int, threads: int) -> dict[str, float]:
        """GiB/s into and out of the segment, in batches of `BATCH` pieces of `size` bytes."""
        into = self._seconds(self._side.source, self._shared, size, threads)
        out_of = self._seconds(self._shared, self._side.target, size, threads)
        gib = self._shared.nbytes / (1 << 30)
        return {"put": gib / into, "get": gib / out_of}

    def _seconds(self, source: np.ndarray, target: np.ndarray, size: int, threads: int) -> float:
        pairs = [(target[s : s + size], source[s : s + size]) for s in range(0, source.nbytes, size)]
        batches = [pairs[i : i + BATCH] for i in range(0, len(pairs), BATCH)]

        def run() -> None:
            for batch in batches:
                shared = iter(batch)  # a thread that comes late copies less
                others = [self._helpers.submit(_copy, shared) for _ in range(threads - 1)]
                _copy(shared)
                for other in others:
                    other.result()

        return timed(run)


def _copy(pairs: Iterator[tuple[np.ndarray, np.ndarray]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)
