"""Caches that evict the block of the least rank: LFU, length-aware, and Belady's bound. One lazy heap serves all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from moonpool.conductor.caches.base import Access, BlockCache, access_of

Rank: TypeAlias = tuple[float, int]
"""Least goes first: a number of the policy's, then the time of the last touch, counted in touches."""
_STALE_SHARE = 4
"""The heap is rebuilt when it has more than this many entries for each block."""


class Ranked(BlockCache):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._clear()

    def _clear(self) -> None:
        self._rank: dict[int, Rank] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._touches = 0

    def clear(self) -> None:
        self._clear()

    def __len__(self) -> int:
        return len(self._rank)

    @property
    def held(self) -> Container[int]:
        return self._rank

    def access(self, keys: Sequence[int], now: float) -> Access:
        hits = self.depth(keys)
        added: list[int] = []
        for position in range(len(keys) - 1, -1, -1):
            key = keys[position]
            if key not in self._rank:
                added.append(key)
            self._touches += 1
            rank = (self._number(key, position), self._touches)
            self._rank[key] = rank
            heappush(self._heap, (*rank, key))
        evicted = [self._evict() for _ in range(len(self._rank) - self.capacity)]
        if len(self._heap) > _STALE_SHARE * len(self._rank) + 1024:
            self._heap = [(*rank, key) for key, rank in self._rank.items()]
            heapify(self._heap)
        return access_of(hits, added, evicted)

    @abstractmethod
    def _number(self, key: int, position: int) -> float:
        """Of a block that is touched now, at this place of its prompt."""

    def _evict(self) -> int:
        while True:
            number, touch, key = heappop(self._heap)
            if self._rank.get(key) == (number, touch):
                del self._rank[key]
                return key


class LFU(Ranked):
    """Evicts the block with the fewest uses since it was added, of equals the one used longest ago."""

    name = "lfu"

    def _clear(self) -> None:
        super()._clear()
        self._uses: dict[int, int] = {}

    def _number(self, key: int, position: int) -> float:
        uses = self._uses[key] = self._uses.get(key, 0) + 1
        return uses

    def _evict(self) -> int:
        key = super()._evict()
        del self._uses[key]
        return key


class LengthAware(Ranked):
    """Evicts the deepest block. The Mooncake paper names such a policy and does not define it: this is our reading."""

    name = "length_aware"

    def _number(self, key: int, position: int) -> float:
        return -position


class Belady(Ranked):
    """Evicts the block that is used again last or never. It is told all prompts at the start: a bound, not a policy.

    The prompts must then come in just this order.
    """

    name = "belady"

    def __init__(self, capacity: int, prompts: Iterable[Sequence[int]]) -> None:
        super().__init__(capacity)
        self._uses: dict[int, list[int]] = {}
        for i, keys in enumerate(prompts):
            for key in set(keys):
                self._uses.setdefault(key, []).append(i)
        for uses in self._uses.values():
            uses.reverse()

    def _number(self, key: int, position: int) -> float:
        uses = self._uses[key]
        uses.pop()
        return -uses[-1] if uses else float("-inf")
