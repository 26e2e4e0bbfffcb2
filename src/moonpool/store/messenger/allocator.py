"""Space in the segment: a pure offset allocator. Best fit, neighbours merged, every block aligned.

|  used  |  free  |  used  |      free      |        free blocks are never adjacent
"""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGN = 64
"""A cache line; also enough for any dtype's alignment."""


_MASK = ALIGN - 1


def rounded(size: int) -> int:
    return (size + _MASK) & ~_MASK


class Allocator:
    """Offsets `[0, capacity)`. Not thread-safe; the caller locks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // ALIGN * ALIGN
        self.used = 0
        self._used: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        if self.capacity:
            self._insert(0, self.capacity)

    @property
    def largest_free(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    def allocate(self, size: int) -> int | None:
        """Offset of a block of at least `size` bytes; None if no free block is that large. Size 0 takes no space."""
        need = rounded(size)
        if need == 0:
            return 0
        at = bisect_left(self._by_size, (need, 0))
        if at == len(self._by_size):
            return None
        block, start = self._by_size.pop(at)
        del self._by_start[start]
        if block > need:  # the rest keeps its end
            rest = start + need
            insort(self._by_size, (block - need, rest))
            self._by_start[rest] = block - need
            self._by_end[start + block] = rest
        else:
            del self._by_end[start + block]
        self._used[start] = need
        self.used += need
        return start

    def free(self, offset: int, size: int) -> None:
        """Give back what `allocate(size)` returned. Giving back twice is a bug of the caller and raises KeyError."""
        if rounded(size) == 0:
            return
        block = self._used.pop(offset)
        self.used -= block
        start, end = offset, offset + block
        if start in self._by_end:
            before = self._by_end[start]
            self._remove(before, start - before)
            start = before
        if end in self._by_start:
            after = self._by_start[end]
            self._remove(end, after)
            end += after
        self._insert(start, end - start)

    def _insert(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._by_start[start] = size
        self._by_end[start + size] = start

    def _remove(self, start: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, start))]
        del self._by_start[start]
        del self._by_end[start + size]

    def check_integrity(self) -> None:
        """Blocks tile the segment without gap or overlap, and no two free ones touch."""
        blocks = sorted(
            [(s, n, False) for s, n in self._used.items()] + [(s, n, True) for s, n in self._by_start.items()]
        )
        at, was_free = 0, False
        for start, size, free in blocks:
            assert start == at, f"gap or overlap at {at}"
            assert size > 0
            assert start % ALIGN == 0
            assert not (free and was_free), f"unmerged free blocks at {start}"
            at, was_free = start + size, free
        assert at == self.capacity
        assert self.used == sum(self._used.values())
        assert sorted(self._by_size) == self._by_size
        assert {(s, n) for n, s in self._by_size} == set(self._by_start.items())
        assert {(e - s, s) for e, s in self._by_end.items()} == {(n, s) for n, s in self._by_size}
