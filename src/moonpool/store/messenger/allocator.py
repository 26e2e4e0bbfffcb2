"""Space in the segment: a pure offset allocator. Best fit, neighbours merged, every block aligned.

|  used  |  free  |  used  |      free      |        free blocks are never adjacent

Free blocks are kept by size. Different sizes must add up to no more than the capacity, so a segment of n bytes has fewer than
√(2n/ALIGN) of them, and a call costs a search in a list that short however many blocks are free.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

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
        self._sizes: list[int] = []
        """The sizes of free blocks, ascending, each once."""
        self._of_size: dict[int, dict[int, None]] = {}
        """Starts of the free blocks of each size; the one freed last, whose memory is warm, is taken first."""
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        if self.capacity:
            self._insert(0, self.capacity)

    @property
    def largest_free(self) -> int:
        return self._sizes[-1] if self._sizes else 0

    def allocate(self, size: int) -> int | None:
        """Offset of a block of at least `size` bytes; None if no free block is that large. Size 0 takes no space."""
        need = rounded(size)
        if need == 0:
            return 0
        at = bisect_left(self._sizes, need)
        if at == len(self._sizes):
            return None
        block = self._sizes[at]
        starts = self._of_size[block]
        start = starts.popitem()[0]
        if not starts:
            del self._of_size[block]
            del self._sizes[at]
        del self._by_start[start]
        if block > need:  # the rest keeps its end
            self._by_end[start + block] = start + need
            self._by_start[start + need] = block - need
            self._list(start + need, block - need)
        else:
            del self._by_end[start + block]
        self.used += need
        return start

    def would_be_free(self, offset: int, size: int) -> int:
        """Size of the free block that freeing this used one would leave."""
        block = rounded(size)
        before = offset - self._by_end.get(offset, offset)
        return before + block + self._by_start.get(offset + block, 0)

    def free(self, offset: int, size: int) -> None:
        """Give back what `allocate(size)` returned. Giving back twice is a bug of the caller; what can be noticed raises KeyError."""
        block = rounded(size)
        if block == 0:
            return
        start, end = offset, offset + block
        if start in self._by_start or end in self._by_end or not 0 <= start < end <= self.capacity:
            raise KeyError(offset)
        self.used -= block
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
        self._by_start[start] = size
        self._by_end[start + size] = start
        self._list(start, size)

    def _list(self, start: int, size: int) -> None:
        starts = self._of_size.get(size)
        if starts is None:
            starts = self._of_size[size] = {}
            insort(self._sizes, size)
        starts[start] = None

    def _remove(self, start: int, size: int) -> None:
        starts = self._of_size[size]
        del starts[start]
        if not starts:
            del self._of_size[size]
            del self._sizes[bisect_left(self._sizes, size)]
        del self._by_start[start]
        del self._by_end[start + size]

    def check_integrity(self, used: Iterable[tuple[int, int]] | None = None) -> None:
        """No two free blocks touch, and all indexes agree; the caller's (offset, size) in use fill the gaps, if given."""
        gaps: list[tuple[int, int]] = []
        at = 0
        for start, size in sorted(self._by_start.items()):
            assert size > 0
            assert start % ALIGN == 0
            assert start > at or start == at == 0, f"unmerged or overlapping free blocks at {start}"
            if start > at:
                gaps.append((at, start - at))
            at = start + size
        if at < self.capacity:
            gaps.append((at, self.capacity - at))
        assert self.used == sum(size for _, size in gaps)
        assert self._sizes == sorted(self._of_size)
        assert {(s, n) for n, starts in self._of_size.items() for s in starts} == set(self._by_start.items())
        assert {(e - s, s) for e, s in self._by_end.items()} == {(n, s) for s, n in self._by_start.items()}
        if used is not None:
            self._check_gaps(gaps, sorted((s, rounded(n)) for s, n in used if n))

    @staticmethod
    def _check_gaps(gaps: list[tuple[int, int]], used: list[tuple[int, int]]) -> None:
        """Neighbours in use, made one, are exactly the gaps."""
        runs: list[tuple[int, int]] = []
        for start, size in used:
            if runs and sum(runs[-1]) == start:
                runs[-1] = (runs[-1][0], runs[-1][1] + size)
            else:
                runs.append((start, size))
        assert runs == gaps, "what is in use does not fill what is not free"
