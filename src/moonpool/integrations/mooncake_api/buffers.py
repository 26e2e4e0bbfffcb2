"""Memory that the peer's API hands out: what a read returned (`BufferHandle`) and pools of registered buffers (`BufferPool`).

The names, arguments and errors are the peer's (`mooncake.store`): a pool's refusals are RuntimeErrors there, so they are here.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import defaultdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from moonpool.types import BufferLike

Bytes: TypeAlias = npt.NDArray[np.uint8]


class _Memory(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes with an identity. Before Python 3.12 only a C type can answer the buffer protocol, hence an ndarray; unlike one
    it is compared by identity and is true when not empty, as the peer's objects are (`if handle:`, `handle in handles`)."""

    if TYPE_CHECKING:

        def __buffer__(self, flags: int, /) -> memoryview: ...  # numpy answers in C

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __eq__(self, other: object) -> Any:
        return self is other

    def __ne__(self, other: object) -> Any:
        return self is not other

    def __bool__(self) -> bool:
        return len(self) > 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} B>"


class BufferHandle(_Memory):
    """One object's bytes as a read returned them; `memoryview(handle)` and `torch.frombuffer(handle, ...)` copy nothing."""

    @classmethod
    def allocate(cls, size: int) -> Self:
        """Private, writable memory of `size` bytes, not cleared: the caller fills all of it."""
        return np.empty(size, np.uint8).view(cls)

    @classmethod
    def wrap(cls, buffer: BufferLike) -> Self:
        """A handle on the bytes of `buffer` (contiguous), which it keeps alive. Read-only if the buffer is."""
        view = memoryview(buffer)
        return np.frombuffer(view, np.uint8).view(cls) if view.nbytes else cls.allocate(0)

    def ptr(self) -> int:
        """The address of the first byte."""
        return int(self.ctypes.data)

    def size(self) -> int:  # type: ignore[override]  # the peer's is a method; numpy itself looks below Python
        """Bytes."""
        return len(self)


class PoolStore(Protocol):
    """What a pool needs of the store."""

    local_buffer_size: int
    """Bytes that `setup` was given for the local buffer; 0 before `setup`."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...

    def unregister_buffer(self, buffer_ptr: int) -> int: ...


class _Region:
    """Anonymous memory from the system, aligned, given back with the last view of it."""

    def __init__(self, size: int, alignment: int) -> None:
        slack = max(0, alignment - mmap.PAGESIZE)  # a mapping starts at a page; pages that nobody touches cost nothing
        whole = np.frombuffer(mmap.mmap(-1, size + slack), np.uint8)
        start = -int(whole.ctypes.data) % alignment
        self.memory: Bytes = whole[start : start + size]
        self.ptr = int(self.memory.ctypes.data)
        self.size = size


class BufferLeaseView(_Memory):
    """The leased bytes; as long as a view (or a slice of one) lives, its lease cannot be released."""

    lease: BufferLease | None = None

    @property
    def buffer(self) -> memoryview:
        return memoryview(self)


class BufferLease:
    """One buffer of a pool, until `release` (or the end of a `with` block, or the last reference)."""

    def __init__(self, pool: BufferPool, region: _Region, size: int) -> None:
        self._pool, self._region, self._size = pool, region, size
        self._open = True
        self._views: list[weakref.ref[BufferLeaseView]] = []

    @property
    def ptr(self) -> int:
        """The address. Raises RuntimeError after `release`."""
        self._check_open()
        return self._region.ptr

    @property
    def size(self) -> int:
        """The bytes that were asked for."""
        return self._size

    @property
    def buffer(self) -> memoryview:
        """A writable view of `size` bytes. Raises RuntimeError after `release`."""
        self._check_open()
        view = self._region.memory[: self._size].view(BufferLeaseView)
        view.lease = self
        self._views = [v for v in self._views if v() is not None]
        self._views.append(weakref.ref(view))
        return memoryview(view)

    def release(self) -> None:
        """Gives the buffer back; twice is once. Raises RuntimeError while a view of it exists."""
        if any(v() is not None for v in self._views):
            raise RuntimeError("cannot release buffer while exported views exist")
        self._give_back()

    def _give_back(self) -> None:
        if self._open:
            self._open = False
            self._pool._give_back(self._region)

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError("buffer lease is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self._give_back()  # a view would hold the lease, so there is none


class BufferPool:
    """Buffers registered with a store. A released one is kept for the next request of its size while there is room.

    `max_bytes` bounds what is leased and kept; 0 means twice the store's local buffer, and never less than that buffer.
    `min_size_class` and `max_size_class` are taken for compatibility: buffers have exactly the size that was asked for.
    `alignment`: bytes, a power of two. `default_timeout`: seconds to wait for room, None for ever. `max_regions` bounds the
    leases. Every refusal is a RuntimeError, a wrong type a TypeError.
    """

    def __init__(
        self,
        store: PoolStore,
        max_bytes: int = 0,
        min_size_class: int = 64 << 10,
        max_size_class: int | None = None,
        alignment: int = 8 << 20,
        block_on_exhaustion: bool = True,
        default_timeout: float | None = None,
        max_regions: int | None = None,
        prewarm_size: int | None = None,
        prewarm_count: int = 0,
    ) -> None:
        self._leased: dict[int, _Region] = {}
        self._closed = False  # first, so that a refused pool can be collected
        if not hasattr(store, "register_buffer"):
            raise RuntimeError("BufferPool needs a MooncakeDistributedStore")
        if _count(min_size_class, "min_size_class") == 0 or _count(alignment, "alignment") == 0:
            raise RuntimeError("min_size_class and alignment must be positive")
        if alignment < 8 or alignment & (alignment - 1):
            raise RuntimeError("alignment must be a power of two and at least sizeof(void*)")
        if store.local_buffer_size == 0:
            raise RuntimeError("BufferPool requires a store that was set up with a local buffer")
        self._store, self._alignment = store, alignment
        self._max_bytes = (
            max(_count(max_bytes, "max_bytes"), store.local_buffer_size) if max_bytes else 2 * store.local_buffer_size
        )
        self._block, self._timeout = block_on_exhaustion, default_timeout
        self._max_regions = max_regions
        self._idle: defaultdict[int, list[_Region]] = defaultdict(list)
        self._leased_bytes = self._idle_bytes = self._pending = 0
        self._changed = threading.Condition(
            threading.RLock()
        )  # a collected lease may return while this thread holds it
        if prewarm_size is not None and prewarm_count:
            self.prewarm(prewarm_size, prewarm_count)

    def acquire(self, size: int, block: bool | None = None, timeout: float | None = None) -> BufferLease:
        """A buffer of `size` bytes. `block` and `timeout` (seconds) stand for the pool's own where they are given."""
        need = max(_count(size, "size"), 1)
        timeout = self._timeout if timeout is None else timeout
        if timeout is not None and timeout < 0:
            raise RuntimeError("timeout must be non-negative")
        if need > self._max_bytes:
            raise RuntimeError(f"requested buffer size exceeds pool capacity: {need} B of {self._max_bytes} B")
        self._await_room(need, self._block if block is None else block, timeout)
        try:
            region = self._take_idle(need) or self._allocate(need)
        except BaseException:
            self._leave(need)
            raise
        with self._changed:
            self._pending -= 1
            self._leased[region.ptr] = region
        return BufferLease(self, region, size)

    def buffer(self, size: int, block: bool | None = None, timeout: float | None = None) -> BufferLease:
        """`acquire` under the name that reads well in a `with`."""
        return self.acquire(size, block, timeout)

    def prewarm(self, size: int, count: int) -> None:
        """Makes `count` buffers ready, as far as there is room: their memory is taken and registered now, not at `acquire`."""
        leases = []
        for _ in range(_count(count, "count")):
            with self._changed:
                if not self._has_room(max(size, 1)):
                    break
            leases.append(self.acquire(size, block=False))
        for lease in leases:
            lease.release()

    def close(self) -> None:
        """Gives all memory back; twice is once. Raises RuntimeError while a buffer is leased."""
        with self._changed:
            if self._leased or self._pending:
                raise RuntimeError("cannot close buffer pool with active leases")
            self._closed = True
            idle = [region for regions in self._idle.values() for region in regions]
            self._idle.clear()
            self._idle_bytes = 0
            self._changed.notify_all()
        for region in idle:
            self._unregister(region)

    def __del__(self) -> None:
        if not self._closed and not self._leased and hasattr(self, "_changed"):
            self.close()

    def _await_room(self, need: int, block: bool, timeout: float | None) -> None:
        """Returns with `need` bytes and one lease reserved."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._has_room(need), timeout if block else 0):
                raise RuntimeError("timed out waiting for buffer" if block else "buffer pool is exhausted")
            if self._closed:
                raise RuntimeError("buffer pool is closed")
            self._leased_bytes += need
            self._pending += 1

    def _has_room(self, need: int) -> bool:
        leases = len(self._leased) + self._pending
        return self._leased_bytes + need <= self._max_bytes and (
            self._max_regions is None or leases < self._max_regions
        )

    def _leave(self, need: int) -> None:
        with self._changed:
            self._leased_bytes -= need
            self._pending -= 1
            self._changed.notify_all()

    def _take_idle(self, need: int) -> _Region | None:
        """An idle buffer of exactly this size; else idle ones go until the new one fits under `max_bytes`."""
        dropped = []
        with self._changed:
            found = self._pop_idle(need) if need in self._idle else None
            while self._leased_bytes + self._idle_bytes > self._max_bytes:
                dropped.append(self._pop_idle(next(iter(self._idle))))
        for region in dropped:
            self._unregister(region)
        return found

    def _pop_idle(self, size: int) -> _Region:
        regions = self._idle[size]
        region = regions.pop()
        if not regions:
            del self._idle[size]
        self._idle_bytes -= size
        return region

    def _allocate(self, need: int) -> _Region:
        region = _Region(need, self._alignment)
        if self._store.register_buffer(region.ptr, region.size) != 0:
            raise RuntimeError("buffer registration failed")
        return region

    def _unregister(self, region: _Region) -> None:
        self._store.unregister_buffer(
            region.ptr
        )  # fails only for a store that was closed before its pool: nothing to undo

    def _give_back(self, region: _Region) -> None:
        with self._changed:
            if self._leased.pop(region.ptr, None) is None:
                return  # two threads released one lease
            self._leased_bytes -= region.size
            self._idle[region.size].append(region)
            self._idle_bytes += region.size
            self._changed.notify_all()


def _count(value: object, name: str) -> int:
    """`value` as the peer's size type takes it. Raises TypeError for anything but an int in [0, 2^64)."""
    if not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise TypeError(f"{name} must be a non-negative integer, not {value!r}")
    return value


RegisteredBufferPool = BufferPool
RegisteredBufferLease = BufferLease
RegisteredBufferLeaseView = BufferLeaseView
