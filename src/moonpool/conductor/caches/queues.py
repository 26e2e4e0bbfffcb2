"""LRU, FIFO and S3-FIFO.

All of them touch or add a prompt's blocks deepest first, so that of two blocks of one prompt the deeper goes first: a block whose
ancestor is gone cannot be hit.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Sequence

from moonpool.conductor.caches.base import Access, BlockCache, access_of


class LRU(BlockCache):
    """Evicts what was used longest ago."""

    name = "lru"
    _refresh = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    @property
    def held(self) -> Container[int]:
        return self._order

    def access(self, keys: Sequence[int], now: float) -> Access:
        hits = self.depth(keys)
        order, added, evicted = self._order, [], []
        for key in reversed(keys):
            if key not in order:
                order[key] = None
                added.append(key)
            elif self._refresh:
                order.move_to_end(key)
        while len(order) > self.capacity:
            evicted.append(order.popitem(last=False)[0])
        return access_of(hits, added, evicted)

    def clear(self) -> None:
        self._order.clear()


class FIFO(LRU):
    """Evicts what was added longest ago."""

    name = "fifo"
    _refresh = False


class S3FIFO(BlockCache):
    """Three queues (Yang et al., SOSP 2023): a tenth for newcomers, a main one with reinsertion, and ghosts of the evicted."""

    name = "s3fifo"
    _most_uses = 3

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small_size = max(1, capacity // 10)
        self.clear()

    def clear(self) -> None:
        self._uses: dict[int, int] = {}
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._uses)

    @property
    def held(self) -> Container[int]:
        return self._uses

    def access(self, keys: Sequence[int], now: float) -> Access:
        hits = self.depth(keys)
        added: list[int] = []
        evicted: list[int] = []
        for key in reversed(keys):
            if key in self._uses:
                self._uses[key] = min(self._most_uses, self._uses[key] + 1)
                continue
            while len(self._uses) >= self.capacity:
                self._evict(evicted)
            self._uses[key] = 0
            added.append(key)
            if self._ghosts.pop(key, self) is None:
                self._main.append(key)
            else:
                self._small.append(key)
        return access_of(hits, added, evicted)

    def _evict(self, evicted: list[int]) -> None:
        """Move blocks on until one is out."""
        while True:
            if len(self._small) >= self._small_size or not self._main:
                key = self._small.popleft()
                if self._uses[key] > 1:
                    self._uses[key] = 0
                    self._main.append(key)
                    continue
                self._ghosts[key] = None
                if len(self._ghosts) > self.capacity - self._small_size:
                    self._ghosts.popitem(last=False)
                break
            key = self._main.popleft()
            if self._uses[key] == 0:
                break
            self._uses[key] -= 1
            self._main.append(key)
        del self._uses[key]
        evicted.append(key)
