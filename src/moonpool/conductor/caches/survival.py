"""Evicts the blocks that promise the fewest hits for the place and time they take (`returns.py` has the estimate).

A dialogue comes back with all that was said before plus a little. So each block belongs to the last prompt that used it, and is worth
what that prompt's return is. Four things tell prompts apart, and how much they tell is learnt from this cache's own requests:

* which turn of a dialogue it is, as far as the cache remembers: the further a dialogue has come, the likelier it goes on;
* how many blocks it added, or, of a first turn, how long it is;
* whether it branched off in the middle of an older prompt instead of continuing it;
* its last block, which is partial in most prompts and different in the next turn; and what a dialogue that went on left behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable, Sequence

from moonpool.conductor.caches.base import Access, BlockCache, access_of
from moonpool.conductor.caches.returns import BOUNDS, BUCKETS, Returns, Visit, bucket_of

_REMEMBERED = 10
"""Keys of blocks that were known lately are kept, so many times the capacity: returns to evicted blocks teach as well."""
_LEARN_EVERY = 64
_ADVANCE_S = 1.0
_CONTINUES = 2
"""A prompt that leaves out at most so many last blocks of an older one continues it."""
_TIP, _LEFT = "last block", "left behind"


class Survival(BlockCache):
    name = "survival"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._returns = Returns()
        self._accesses = 0
        self.clear()

    def clear(self) -> None:
        """What was learnt stays."""
        self._advanced = float("-inf")
        self._known: dict[int, Visit] = {}
        self._parent: dict[int, int | None] = {}
        self._children: dict[int, int] = {}
        self._waiting: dict[int, Visit] = {}
        self._cells: dict[Hashable, list[deque[Visit]]] = {}
        self._order: list[deque[Visit]] = []

    def __len__(self) -> int:
        return len(self._parent)

    @property
    def held(self) -> Container[int]:
        return self._parent

    def access(self, keys: Sequence[int], now: float) -> Access:
        hits = self.depth(keys)
        if not keys:
            return Access(0, [], [])
        self._pass_time(now)
        visit = self._visit(keys, now)
        tip = self._open(Visit(now, _TIP, 0, 1), pooled=False)
        added = [key for key in keys if key not in self._parent]
        self._own(keys, visit, tip)
        evicted: list[int] = []
        while len(self._parent) > self.capacity:
            self._evict(evicted)
        return access_of(hits, added, evicted)

    def _pass_time(self, now: float) -> None:
        self._accesses += 1
        if now - self._advanced >= _ADVANCE_S:
            self._advanced = now
            self._returns.advance(now)
            for cells in self._cells.values():
                for bucket, bound in enumerate(BOUNDS):
                    while cells[bucket] and now - cells[bucket][0].at > bound:
                        cells[bucket + 1].append(cells[bucket].popleft())
        if self._accesses % _LEARN_EVERY == 0:
            self._returns.learn()
            self._sort()

    def _sort(self) -> None:
        """Cells by worth: the first that is not empty has the next victim."""
        ranked = [(self._returns.worth(kind, b), n, b) for n, kind in enumerate(self._cells) for b in BUCKETS]
        ranked.sort()
        cells = list(self._cells.values())
        self._order = [cells[n][b] for _, n, b in ranked]

    def _open(self, visit: Visit, *, pooled: bool) -> Visit:
        self._returns.add(visit, pooled)
        if visit.kind not in self._cells:
            self._cells[visit.kind] = [deque() for _ in BUCKETS]
            self._sort()
        self._cells[visit.kind][0].append(visit)
        return visit

    def _visit(self, keys: Sequence[int], now: float) -> Visit:
        """What this prompt is, and what it tells about the ones before."""
        known = 0
        while known < len(keys) and keys[known] in self._known:
            known += 1
        last = self._known[keys[known - 1]] if known else None
        if last is not None and last.kind == _TIP:
            self._returns.hit(last, now)
            last = self._known[keys[known - 2]] if known > 1 else None
        if last is None or known < 2:
            return self._open(Visit(now, ("first", len(keys).bit_length()), 1, len(keys)), pooled=True)
        if last.length - known > _CONTINUES:
            return self._open(Visit(now, "branch", 1, len(keys)), pooled=True)
        self._returns.hit(last, now)
        turn = last.turn + 1
        kind = ("next", min(turn.bit_length(), 4), min((len(keys) - known).bit_length(), 4))
        visit = self._open(Visit(now, kind, turn, len(keys)), pooled=True)
        self._leave_behind(last, set(keys), now)
        return visit

    def _leave_behind(self, last: Visit, continued: set[int], now: float) -> None:
        rest = [key for key in last.keys if key not in continued and self._known.get(key) is last]
        if rest:
            left = self._open(Visit(now, _LEFT, 0, len(rest)), pooled=False)
            left.keys = rest
            for key in rest:
                self._known[key] = left

    def _own(self, keys: Sequence[int], visit: Visit, tip: Visit) -> None:
        before: int | None = None
        for i, key in enumerate(keys):
            owner = tip if i == len(keys) - 1 else visit
            self._known.pop(key, None)
            self._known[key] = owner
            owner.keys.append(key)
            if key not in self._parent:
                self._parent[key] = before
                if before is not None:
                    self._children[before] = self._children.get(before, 0) + 1
            before = key
        if len(self._known) > _REMEMBERED * self.capacity + len(keys):
            self._forget()

    def _forget(self) -> None:
        """Keys that were used longest ago and are not held."""
        surplus = len(self._known) - _REMEMBERED * self.capacity
        old: list[int] = []
        for key in self._known:
            if len(old) >= surplus:
                break
            if key not in self._parent:
                old.append(key)
        for key in old:
            del self._known[key]

    def _evict(self, evicted: list[int]) -> None:
        """One block, the deepest of the visit that is worth least."""
        for cell in self._order:
            while cell:
                visit = cell[0]
                keys = visit.keys
                while keys and (self._known.get(keys[-1]) is not visit or keys[-1] not in self._parent):
                    keys.pop()
                if not keys:
                    cell.popleft()
                elif self._children.get(keys[-1]):
                    # Others' blocks hang on it: it is worth at least what they are, and comes back when they are gone.
                    self._waiting[keys[-1]] = cell.popleft()
                else:
                    evicted.append(keys.pop())
                    self._drop(evicted[-1])
                    return
        raise AssertionError("every block belongs to a visit in a cell, or waits for one that does")

    def _drop(self, key: int) -> None:
        parent = self._parent.pop(key)
        if parent is None:
            return
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        waiting = self._waiting.pop(parent, None)
        if waiting is not None and self._known.get(parent) is waiting:
            self._cells[waiting.kind][bucket_of(self._advanced - waiting.at)].appendleft(waiting)
