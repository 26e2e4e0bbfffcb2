"""The prefix index: for a chain of block keys, how far each instance holds it from the start.

Holdings of engines that evict from the leaf are *closed*: who holds block i holds all before it. Then the masks along a chain only
lose bits, and the depths of all holders are found with a number of probes that grows with the logarithm of the chain; keys further
down are never even computed. A few random probes check that; an instance that turns out to have holes is walked block by block from
then on.

Pure: time is an argument. Not thread-safe; its owner is one event loop.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from moonpool.conductor.index.holders import HolderSets, Plane
from moonpool.conductor.index.table import PLACE_BYTES, RUN, BlockTable
from moonpool.conductor.types import Chain, Depth, InstanceId, Random
from moonpool.errors import ConfigError

Keys = Sequence[int] | npt.NDArray[np.uint64]
_Turn = Callable[[int], int]
_Holders = Callable[[int], int]
_UNTOLD = (Plane.SENT, Plane.GUESS)
"""Planes that no event fills."""
_EPOCHS = 64
"""Epochs that a full index spans, so that shedding has an order."""
_SWEEP_AT = 64
"""Slots of instances that left, before the sets are swept of them."""


class _Guesses:
    """What an instance is thought to hold: until when each key counts, and the prompts in the order that they came."""

    def __init__(self) -> None:
        self.until: dict[int, float] = {}
        self.batches = deque[tuple[float, Sequence[int]]]()

    def old(self, keys: Sequence[int], now: float) -> list[int]:
        """Takes out those whose time is over; a later prompt may have given them more."""
        until = self.until
        gone = [k for k in keys if until.get(k, now + 1) <= now]
        for key in gone:
            del until[key]
        while self.batches and self.batches[0][0] <= now:
            self.batches.popleft()
        return gone

    def over(self, capacity: int) -> list[int]:
        """Takes out what a cache of `capacity` blocks must have let go: the prompt that came longest ago, deepest block first."""
        gone: list[int] = []
        while self.batches and len(self.until) > capacity:
            until, keys = self.batches.popleft()
            mine = [k for k in keys if self.until.get(k) == until]
            drop = mine[-(len(self.until) - capacity) :]
            for key in drop:
                del self.until[key]
            gone += drop
            if len(drop) < len(mine):
                self.batches.appendleft((until, mine[: -len(drop)]))
        return gone


class PrefixIndex:
    def __init__(self, random: Random, *, max_bytes: int = 1 << 30, guess_s: float = 120.0) -> None:
        """`max_bytes`: of the table; the blocks touched longest ago are forgotten beyond it. `guess_s`: how long a holding counts
        that no event has confirmed."""
        if max_bytes < 4096 * PLACE_BYTES:
            raise ConfigError("index too small", need=f">= {4096 * PLACE_BYTES} B", have=f"{max_bytes} B")
        self._random, self._max, self._guess_s = random, max_bytes, guess_s
        self._table, self._sets = BlockTable(), HolderSets()
        self._slots: dict[InstanceId, int] = {}
        self._names: list[InstanceId | None] = []
        self._free: list[int] = []
        self._dead = 0
        self._holes = 0
        """Slots whose holdings are not closed."""
        self._guesses: dict[tuple[InstanceId, Plane], _Guesses] = {}
        self._capacity: dict[InstanceId, int] = {}
        self._due: list[tuple[float, int, InstanceId, Plane, Sequence[int]]] = []
        self._serial = self._inserted = 0
        self.shed = 0
        """How often the oldest blocks were forgotten for want of room."""

    # -- instances

    def register(self, instance: InstanceId, *, closed: bool = True, guess_blocks: int = 0) -> None:
        """`closed`: it evicts leaf first. `guess_blocks`: capacity of its cache in blocks, for guesses; 0 = unknown."""
        if instance not in self._slots:
            self._slots[instance] = slot = self._free.pop() if self._free else len(self._names)
            if slot == len(self._names):
                self._names.append(instance)
            self._names[slot] = instance
        self._capacity[instance] = guess_blocks
        bit = 1 << self._slots[instance]
        self._holes = self._holes & ~bit if closed else self._holes | bit

    def unregister(self, instance: InstanceId) -> None:
        """Forget an instance and all it holds, at once: its slot is masked out, and swept with others later."""
        slot = self._slots.pop(instance, None)
        if slot is None:
            return
        self._names[slot] = None
        self._dead |= 1 << slot
        for plane in _UNTOLD:
            self._guesses.pop((instance, plane), None)
        self._capacity.pop(instance, None)
        if self._dead.bit_count() >= _SWEEP_AT:
            self._sweep()

    def clear(self, instance: InstanceId) -> None:
        """It holds nothing any more (its cache was reset)."""
        if instance in self._slots:
            closed, capacity = not self._holes >> self._slots[instance] & 1, self._capacity[instance]
            self.unregister(instance)
            self.register(instance, closed=closed, guess_blocks=capacity)

    def _sweep(self) -> None:
        turn = np.array(self._sets.without(self._dead), np.uint32)
        self._table.map_sets(turn)
        self._free += [s for s in range(len(self._names)) if self._dead >> s & 1]
        self._dead = 0

    # -- holdings

    def insert(self, instance: InstanceId, keys: Keys, plane: Plane = Plane.GPU) -> None:
        """An event says so. Raises KeyError for an instance that is not registered."""
        slot, step = self._slots[instance], self._sets.step
        self._change(keys, lambda s: step(s, slot, plane, True))
        self._inserted += len(keys)
        self._bound()

    def remove(self, instance: InstanceId, keys: Keys, plane: Plane = Plane.GPU) -> None:
        slot = self._slots.get(instance)
        if slot is not None:
            step = self._sets.step
            self._change(keys, lambda s: step(s, slot, plane, False))

    def guess(
        self, instance: InstanceId, keys: Sequence[int], now: float, for_s: float = 0.0, plane: Plane = Plane.GUESS
    ) -> None:
        """We sent a prompt there (GUESS), and saw its prefill end (SENT): it will hold these blocks, or does. Counts for `for_s` (0:
        the usual time), or until the instance's cache must have let them go."""
        held, until = self._guesses.setdefault((instance, plane), _Guesses()), now + (for_s or self._guess_s)
        self.insert(instance, keys, plane)
        held.until.update(dict.fromkeys(keys, until))
        held.batches.append((until, keys))
        self._serial += 1
        heapq.heappush(self._due, (until, self._serial, instance, plane, keys))
        capacity = self._capacity.get(instance, 0)
        if capacity and len(held.until) > capacity:
            self.remove(instance, held.over(capacity), plane)

    def forget(self, instance: InstanceId, keys: Sequence[int]) -> None:
        """Drop guesses that will not come true."""
        held = self._guesses.get((instance, Plane.GUESS))
        if held is not None:
            gone = [k for k in keys if held.until.pop(k, None) is not None]
            self.remove(instance, gone, Plane.GUESS)

    def expire(self, now: float) -> None:
        """Drop guesses whose time is over."""
        while self._due and self._due[0][0] <= now:
            _, _, instance, plane, keys = heapq.heappop(self._due)
            held = self._guesses.get((instance, plane))
            if held is not None:
                self.remove(instance, held.old(keys, now), plane)

    def _change(self, keys: Keys, turn: _Turn) -> None:
        table = self._table
        if isinstance(keys, np.ndarray):
            table.change_run(keys, turn)
        elif len(keys) >= RUN:
            run = np.array(keys, np.uint64)
            table.change_run(run if len(set(keys)) == len(keys) else np.unique(run), turn)
        else:
            for key in keys:
                table.change(key, turn)

    def _bound(self) -> None:
        per_epoch = max(1024, self._max // PLACE_BYTES // _EPOCHS)
        if self._inserted >= per_epoch:
            self._inserted = 0
            self._table.tick()
        if self._table.nbytes > self._max:
            self._table.shed(0.5)
            self.shed += 1

    # -- lookup

    def matches(self, chain: Chain) -> dict[InstanceId, Depth]:
        """Every instance that holds the first block, and how deep."""
        length = len(chain)
        if not length:
            return {}
        alive, holders = ~self._dead, self._holders(chain)
        first = holders(0) & alive
        if not first:
            return {}
        found: dict[int, int] = {}
        closed, holed = first & ~self._holes, first & self._holes
        if closed:
            holed |= self._closed_depths(closed, length, holders, found)
        if holed:
            self._walk(holed, length, holders, found)
        return {name: self._depth(chain, slot, depth) for slot, depth in found.items() if (name := self._names[slot])}

    def _holders(self, chain: Chain) -> _Holders:
        seen: dict[int, int] = {}
        key, get, any_ = chain.key, self._table.get, self._sets.any

        def holders(index: int) -> int:
            mask = seen.get(index)
            if mask is None:
                mask = seen[index] = any_[get(key(index))]
            return mask

        return holders

    def _closed_depths(self, wanted: int, length: int, holders: _Holders, found: dict[int, int]) -> int:
        """Depths of closed holders, by galloping and bisection. Returns the slots that turned out to have holes."""
        low, low_mask, step = 0, wanted, 1
        spans: list[tuple[int, int, int, int]] = []
        while low_mask and low < length - 1:
            high = min(length - 1, low + step)
            high_mask = holders(high) & wanted
            spans.append((low, low_mask, high, high_mask & low_mask))
            low, low_mask, step = high, high_mask & low_mask, 2 * step
        for slot in _bits(low_mask):
            found[slot] = low + 1
        while spans:
            low, low_mask, high, high_mask = spans.pop()
            if low_mask == high_mask:
                continue
            if high == low + 1:
                for slot in _bits(low_mask & ~high_mask):
                    found[slot] = high
                continue
            middle = (low + high) // 2
            mask = holders(middle) & low_mask | high_mask
            spans += [(low, low_mask, middle, mask), (middle, mask, high, high_mask)]
        return self._check(found, holders)

    def _check(self, found: dict[int, int], holders: _Holders) -> int:
        """Two probes at random above the deepest holder's end: whoever misses there has holes, now and from now on."""
        deepest = max(found.values(), default=0)
        holes = 0
        for _ in range(2 if deepest > 2 else 0):
            at = self._random.randrange(deepest)
            mask = holders(at)
            for slot, depth in found.items():
                if depth > at and not mask >> slot & 1:
                    holes |= 1 << slot
        self._holes |= holes
        for slot in _bits(holes):
            del found[slot]
        return holes

    @staticmethod
    def _walk(wanted: int, length: int, holders: _Holders, found: dict[int, int]) -> None:
        """Block by block."""
        index, mask = 0, wanted
        while mask and index < length:
            left = holders(index) & mask
            for slot in _bits(mask & ~left):
                found[slot] = index
            mask, index = left, index + 1
        for slot in _bits(mask):
            found[slot] = length

    def _depth(self, chain: Chain, slot: int, blocks: int) -> Depth:
        """With the blocks of it that are there for sure, and those in the engine's own memory: slower tiers hold the tail of a chain
        that has left it."""
        sets, get = self._sets, self._table.get
        last = get(chain.key(blocks - 1))
        gpu, sure = sets.masks[last][Plane.GPU] >> slot & 1, sets.sure[last] >> slot & 1
        if gpu and sure:
            return Depth(blocks, blocks, blocks)
        there = blocks if sure else self._until(blocks - 1, lambda i: sets.sure[get(chain.key(i))] >> slot & 1)
        near = self._until(min(there, blocks - 1), lambda i: sets.masks[get(chain.key(i))][Plane.GPU] >> slot & 1)
        return Depth(blocks, near, there)

    def tiers(self, chain: Chain, instance: InstanceId) -> tuple[int, int, int]:
        """Blocks from the start that are in its own memory, in that or in CPU memory, and in any of its tiers."""
        slot = self._slots.get(instance)
        if slot is None or not len(chain):
            return 0, 0, 0
        masks, get = self._sets.masks, self._table.get

        def deep(*planes: Plane) -> int:
            return self._until(len(chain), lambda i: any(masks[get(chain.key(i))][p] >> slot & 1 for p in planes))

        return deep(Plane.GPU), deep(Plane.GPU, Plane.CPU), deep(Plane.GPU, Plane.CPU, Plane.DISK)

    @staticmethod
    def _until(high: int, holds: Callable[[int], int]) -> int:
        """First index that does not hold, of those before `high` that hold up to somewhere."""
        low = 0
        if not high or not holds(0):
            return 0
        while low < high:
            middle = (low + high) // 2
            if holds(middle):
                low = middle + 1
            else:
                high = middle
        return low

    def shared_depth(self, chain: Chain, instances: int) -> int:
        """Blocks from the start that nine tenths of `instances` hold."""
        need, holders, alive = max(2, -(-9 * instances // 10)), self._holders(chain), ~self._dead
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2 if low or high < len(chain) else 0
            if (holders(middle) & alive).bit_count() >= need:
                low = middle + 1
            else:
                high = middle
        return low

    # -- figures

    @property
    def blocks(self) -> int:
        """Blocks that somebody holds (or held, and has left since the last sweep)."""
        return self._table.live

    @property
    def nbytes(self) -> int:
        """Of the table; sets and guesses come on top, and are few."""
        return self._table.nbytes

    @property
    def distinct_sets(self) -> int:
        return len(self._sets)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
