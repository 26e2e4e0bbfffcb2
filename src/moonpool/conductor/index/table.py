"""An open-addressing table of 64-bit keys: 13 bytes a place, at most two thirds full.

    key u64 (0 = free) │ set u32 (0 = nobody holds it: a place to be reclaimed) │ epoch u8 (when it was last touched)

Keys are hashes, so a key is its own hash. Single places are read through memoryviews, which Python does several times faster than
through numpy; long runs go through numpy at once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
_FULL = 2 / 3
RUN = 48
"""Keys from which a run goes through numpy."""
_FEWEST = 1024
PLACE_BYTES = 13
_ZERO = 0x9E3779B97F4A7C15
"""Stands for key 0, which marks a free place."""


class BlockTable:
    def __init__(self, places: int = _FEWEST) -> None:
        """`places`: a power of two."""
        self.live = 0
        """Keys with a holder."""
        self.epoch = 0
        self._allocate(places)

    def _allocate(self, places: int) -> None:
        self._mask, self._used = places - 1, 0
        self.keys = np.zeros(places, np.uint64)
        self.sets = np.zeros(places, np.uint32)
        self.epochs = np.zeros(places, np.uint8)
        self._k, self._s, self._e = self.keys.data, self.sets.data, self.epochs.data

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.sets.nbytes + self.epochs.nbytes

    def get(self, key: int) -> int:
        """Set of a key; 0 where nobody holds it."""
        key = key or _ZERO
        keys, mask = self._k, self._mask
        at = key & mask
        while (found := keys[at]) != key:
            if not found:
                return 0
            at = (at + 1) & mask
        return int(self._s[at])

    def change(self, key: int, turn: Callable[[int], int]) -> None:
        """Replace a key's set by `turn(set)`; a key that is not there has set 0, and is not put there for set 0."""
        key = key or _ZERO
        keys, mask = self._k, self._mask
        at = key & mask
        while (found := keys[at]) != key:
            if not found:
                new = turn(0)
                if new:
                    keys[at], self._s[at], self._e[at] = key, new, self.epoch
                    self._used += 1
                    self.live += 1
                    if self._used > _FULL * (mask + 1):
                        self._grow()
                return
            at = (at + 1) & mask
        old = self._s[at]
        new = turn(old)
        self._s[at], self._e[at] = new, self.epoch
        self.live += bool(new) - bool(old)

    def change_run(self, keys: U64, turn: Callable[[int], int]) -> None:
        """`change` for many keys, each once."""
        if len(keys) < RUN:
            for key in keys.tolist():
                self.change(key, turn)
            return
        if not keys.all():
            keys = np.where(keys == 0, np.uint64(_ZERO), keys)
        while self._used + len(keys) > _FULL * (self._mask + 1):
            self._grow(self._used + len(keys))
        places = self._places(keys)
        there = places >= 0
        old = np.where(there, self.sets[places], np.uint32(0))
        new = self._turned(old, turn)
        put = ~there & (new != 0)
        places[put] = self._put(keys[put])
        at = there | put
        self.sets[places[at]], self.epochs[places[at]] = new[at], self.epoch
        self.live += int((new != 0).sum()) - int((old != 0).sum())

    @staticmethod
    def _turned(old: NDArray[np.uint32], turn: Callable[[int], int]) -> NDArray[np.uint32]:
        """A run has few different sets, mostly one."""
        first = int(old[0])
        if (old == first).all():
            return np.full(len(old), turn(first), np.uint32)
        uniques, which = np.unique(old, return_inverse=True)
        return np.array([turn(int(u)) for u in uniques], np.uint32)[which]

    def _places(self, keys: U64) -> NDArray[np.int64]:
        """Where each key is; -1 where it is not."""
        at = (keys & np.uint64(self._mask)).astype(np.int64)
        found = self.keys[at]
        missed = (found != keys) & (found != 0)
        while missed.any():
            at[missed] = (at[missed] + 1) & self._mask
            found = self.keys[at]
            missed = (found != keys) & (found != 0)
        at[found == 0] = -1
        return at

    def _put(self, keys: U64) -> NDArray[np.int64]:
        """Places for keys that are not there: of those that want one free place, one gets it, the others go on."""
        at = (keys & np.uint64(self._mask)).astype(np.int64)
        open_ = np.arange(len(keys))
        while len(open_):
            want = at[open_]
            free = self.keys[want] == 0
            self.keys[want[free]] = keys[open_[free]]
            lost = open_[self.keys[want] != keys[open_]]
            at[lost] = (at[lost] + 1) & self._mask
            open_ = lost
        self._used += len(keys)
        return at

    def _grow(self, need: int = 0) -> None:
        """Rehash without the places that nobody holds, into as many as it takes."""
        held = self.sets != 0
        keys, sets, epochs = self.keys[held], self.sets[held], self.epochs[held]
        places = _FEWEST
        while max(len(keys), need) > _FULL / 2 * places:
            places *= 2
        self._refill(keys, sets, epochs, places)

    def _refill(self, keys: U64, sets: NDArray[np.uint32], epochs: NDArray[np.uint8], places: int) -> None:
        self._allocate(places)
        at = self._put(keys)
        self.sets[at], self.epochs[at] = sets, epochs
        self.live = len(keys)

    def shed(self, share: float) -> None:
        """Forget about `share` of the keys, those touched longest ago."""
        held = np.flatnonzero(self.sets)
        age = (np.int16(self.epoch) - self.epochs[held].astype(np.int16)) % 256
        count = max(1, int(share * len(held)))
        drop = held[np.argpartition(-age, count - 1)[:count]]
        self.sets[drop] = 0
        self.live -= len(drop)
        self._grow()

    def tick(self) -> None:
        """A new epoch begins."""
        self.epoch = (self.epoch + 1) % 256

    def map_sets(self, turn: NDArray[np.uint32]) -> None:
        """Replace each set by `turn[set]`."""
        before = int((self.sets != 0).sum())
        self.sets[:] = turn[self.sets]
        self.live += int((self.sets != 0).sum()) - before
