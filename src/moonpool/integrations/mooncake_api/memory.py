"""Raw pointers: callers pass addresses as ints, and own the memory behind them for as long as a call runs.

Nothing can check that an address is valid; a wrong one kills the process, here as in the peer.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import mmap
import operator
import os
import threading
from pathlib import Path

from moonpool.errors import ConfigError

log = logging.getLogger(__name__)

_READ, _WRITE = 0x100, 0x200
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.restype = ctypes.py_object
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_ALIGN = 64


def view_at(address: int, size: int, *, writable: bool = False) -> memoryview:
    """The `size` bytes at `address`. It keeps nothing alive. (A ctypes array would make a new type for each size, 19 us.)

    Raises ConfigError for a null address or a negative size, TypeError for what is no int.
    """
    address, size = operator.index(address), operator.index(size)
    if size < 0 or (address <= 0 and size):
        raise ConfigError("no memory there", need="an address above 0 and a size", have=f"{address:#x}, {size} B")
    view: memoryview = _from_memory(address, size, _WRITE if writable else _READ)
    return view


class Ranges:
    """The memory that a caller registered: ranges that do not overlap. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    def add(self, address: int, size: int) -> None:
        """Raises ConfigError for a size below 1 and for a range that overlaps a registered one."""
        address, size = operator.index(address), operator.index(size)
        if address <= 0 or size <= 0:
            raise ConfigError("cannot register", need="an address and a size above 0", have=f"{address:#x}, {size} B")
        with self._lock:
            at = bisect.bisect_right(self._starts, address)
            before = self._starts[at - 1] if at else 0
            after = self._starts[at] if at < len(self._starts) else address + size
            if before + self._sizes.get(before, 0) > address or address + size > after:
                raise ConfigError("memory is registered already", key=f"{address:#x}", have=f"{size} B")
            self._starts.insert(at, address)
            self._sizes[address] = size

    def remove(self, address: int) -> None:
        """Raises ConfigError for an address that no registered range starts at."""
        with self._lock:
            if self._sizes.pop(operator.index(address), None) is None:
                raise ConfigError("memory is not registered", key=f"{address:#x}")
            self._starts.remove(address)

    def room_at(self, address: int) -> int:
        """Bytes from `address` to the end of the registered range that it lies in; 0 if it lies in none."""
        with self._lock:
            at = bisect.bisect_right(self._starts, operator.index(address)) - 1
            if at < 0:
                return 0
            start = self._starts[at]
            return max(0, start + self._sizes[start] - address)

    def clear(self) -> None:
        with self._lock:
            self._starts.clear()
            self._sizes.clear()


class MemoryPool:
    """`size` bytes of zeroed private memory, handed out from its start and given back as a whole. Pages come when touched."""

    def __init__(self, size: int) -> None:
        """Raises ConfigError if there is no such memory."""
        self._lock = threading.Lock()
        try:
            self._map = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError) as e:
            raise ConfigError(f"cannot have the memory: {e}", have=f"{size} B") from e
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self._start, self._used, self.size = ctypes.addressof(self._anchor), 0, size

    def alloc(self, size: int) -> int:
        """An address aligned to 64 bytes, or 0 if `size` bytes are not left."""
        with self._lock:
            if size <= 0 or self._used + size > self.size:
                return 0
            address = self._start + self._used
            self._used = (self._used + size + _ALIGN - 1) // _ALIGN * _ALIGN
            return address


class MooncakeHostMemAllocator:
    """Host memory by address. Each block is a mapping of its own, so that freeing returns it to the system."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[int, MemoryPool] = {}

    def alloc(self, size: int) -> int:
        """The address of `size` zeroed bytes; 0 if there are none."""
        try:
            block = MemoryPool(operator.index(size))
        except ConfigError:
            return 0
        address = block.alloc(block.size)
        with self._lock:
            self._blocks[address] = block
        return address

    def free(self, ptr: int) -> int:
        """0, or -600 for an address that `alloc` did not return. Nobody may touch the block any more."""
        with self._lock:
            return 0 if self._blocks.pop(ptr, None) else -600


def bind_to_numa_node(node: int) -> None:
    """Run this thread on the CPUs of a NUMA node, where first touch then places its memory. Does nothing for an unknown node."""
    try:
        text = Path(f"/sys/devices/system/node/node{operator.index(node)}/cpulist").read_text()
    except OSError:
        log.warning("no NUMA node %d here", node)
        return
    cpus: set[int] = set()
    for piece in text.strip().split(","):
        low, _, high = piece.partition("-")
        if low:
            cpus.update(range(int(low), int(high or low) + 1))
    if cpus & os.sched_getaffinity(0):
        os.sched_setaffinity(0, cpus & os.sched_getaffinity(0))
