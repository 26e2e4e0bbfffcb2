"""The slab: one block of this process, registered with the peer, out of which reads and writes get their space."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moonpool.errors import NoSpace, ObjectTooLarge
from moonpool.store.messenger.allocator import Allocator, rounded

_FIX = "Close read leases, commit or revoke reservations, or enlarge slab_size."


class Block(NamedTuple):
    offset: int
    size: int


class Slab:
    """Thread-safe. The memory lives as long as a view over it."""

    def __init__(self, capacity: int) -> None:
        self._space = Allocator(capacity)
        self._lock = threading.Lock()
        self._map = mmap.mmap(-1, max(capacity, mmap.PAGESIZE))
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.address = int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)
        self.capacity = self._space.capacity

    def take(self, key: str, size: int) -> Block:
        """Space for one object. Raises ObjectTooLarge, NoSpace; never waits."""
        if rounded(size) > self.capacity:
            raise ObjectTooLarge(
                "larger than the slab", key=key, need=f"{size} B", have=f"{self.capacity} B", fix="Enlarge slab_size."
            )
        with self._lock:
            offset = self._space.allocate(size)
            if offset is None:
                raise NoSpace("the slab is full", key=key, need=f"{size} B in one piece", have=self._left(), fix=_FIX)
            return Block(offset, size)

    def take_all(self, items: Sequence[tuple[str, int]]) -> list[Block]:
        """Space for all or none. Raises like `take`."""
        taken: list[Block] = []
        try:
            for key, size in items:
                taken.append(self.take(key, size))
        except BaseException:
            self.give(taken)
            raise
        return taken

    def _left(self) -> str:
        return f"{self._space.largest_free} B in one piece, {self._space.used} of {self.capacity} B in use"

    def give(self, blocks: Sequence[Block]) -> None:
        with self._lock:
            for block in blocks:
                self._space.free(*block)

    def view(self, block: Block) -> memoryview:
        return memoryview(self._map)[block.offset : block.offset + block.size]

    def pointer(self, block: Block) -> int:
        return self.address + block.offset

    @property
    def used(self) -> int:
        """Bytes that are being read or written."""
        with self._lock:
            return self._space.used

    @property
    def largest_free(self) -> int:
        with self._lock:
            return self._space.largest_free

    def check_integrity(self) -> None:
        with self._lock:
            self._space.check_integrity()
