"""How likely a prompt's blocks are used again, learnt while it happens: a survival estimate for each kind of prompt.

Time since a block's last use falls into buckets that widen geometrically. For each kind of prompt two things are counted in each
bucket: prompts that came into it without having returned, and prompts that returned in it. Kinds are few and many of them rare, so a
kind's hazard is the hazard of all prompts times a factor, and the factor is held near 1 until returns speak against it.

What a block is worth then is the best ratio, over all times that one may keep it, of the chance that it is used until then and the
time that it takes up its place: Gittins' index, in hits for each block and second.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable

_FIRST_S, _RATIO, _COUNT = 4.0, 1.3, 26
BOUNDS = [_FIRST_S * _RATIO**i for i in range(_COUNT - 1)]
"""Upper ends of the buckets in seconds; the last bucket has none. 4 s … 36 min."""
BUCKETS = range(_COUNT)
_WIDTHS = [high - low for low, high in zip([0.0, *BOUNDS[:-1]], BOUNDS, strict=True)] + [BOUNDS[-1]]
_PRIOR_SHARE, _PRIOR_AGE_S, _PRIOR_PROMPTS = 0.3, 60.0, 20.0
"""Before anything is learnt: a hyperbolic hazard, share/(age + _PRIOR_AGE_S), that weighs as much as so many prompts."""
_PRIOR_RETURNS = 4.0
"""Returns at which a kind's own count weighs as much as what all prompts do."""
_ZONES = 3
"""Stretches of age in which a kind may differ from the others by a factor of its own."""


class Visit:
    """A prompt, for as long as its blocks are known."""

    __slots__ = ("at", "keys", "kind", "length", "returned", "turn")

    def __init__(self, at: float, kind: Hashable, turn: int, length: int) -> None:
        self.at, self.kind, self.turn, self.length = at, kind, turn, length
        self.returned = False
        self.keys: list[int] = []


class _Kind:
    """Counts of one kind, and its visits that may still go from bucket to bucket."""

    def __init__(self, pooled: bool) -> None:
        self.pooled = pooled
        self.entered = [0.0] * _COUNT
        self.returns = [0.0] * _COUNT
        self.ageing: list[deque[Visit]] = [deque() for _ in BUCKETS]
        self.worth = [0.0] * _COUNT


class Returns:
    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}

    def add(self, visit: Visit, pooled: bool) -> None:
        """Watch a visit. `pooled`: its kind counts for what all prompts do."""
        kind = self._kinds.get(visit.kind)
        if kind is None:
            kind = self._kinds[visit.kind] = _Kind(pooled)
            self.learn()
        kind.ageing[0].append(visit)
        kind.entered[0] += 1

    def hit(self, visit: Visit, now: float) -> None:
        """The visit's blocks were used again. Counts once."""
        if not visit.returned:
            visit.returned = True
            bucket = bucket_of(now - visit.at)
            self._kinds[visit.kind].returns[bucket] += 1

    def advance(self, now: float) -> None:
        """Let the visits that have not returned grow older."""
        for kind in self._kinds.values():
            for bucket, bound in enumerate(BOUNDS):
                queue, older = kind.ageing[bucket], kind.ageing[bucket + 1]
                while queue and now - queue[0].at > bound:
                    visit = queue.popleft()
                    if not visit.returned:
                        kind.entered[bucket + 1] += 1
                        older.append(visit)
            while kind.ageing[-1] and now - kind.ageing[-1][0].at > 2 * BOUNDS[-1]:
                kind.ageing[-1].popleft()

    def learn(self) -> None:
        """Put what was counted into `worth`."""
        pool = self._pool()
        for kind in self._kinds.values():
            kind.worth = _worth(_hazard(kind, pool))

    def worth(self, kind: Hashable, bucket: int) -> float:
        return self._kinds[kind].worth[bucket]

    def _pool(self) -> list[float]:
        pool = []
        low = 0.0
        for bucket, width in enumerate(_WIDTHS):
            prior = min(0.9, _PRIOR_SHARE * width / (low + width / 2 + _PRIOR_AGE_S))
            entered = sum(k.entered[bucket] for k in self._kinds.values() if k.pooled)
            returns = sum(k.returns[bucket] for k in self._kinds.values() if k.pooled)
            pool.append((returns + _PRIOR_PROMPTS * prior) / (entered + _PRIOR_PROMPTS))
            low += width
        return pool


def bucket_of(age: float) -> int:
    return bisect_right(BOUNDS, age)


def _hazard(kind: _Kind, pool: list[float]) -> list[float]:
    """Chance to return within each bucket of one that came into it."""
    expected = [n * p for n, p in zip(kind.entered, pool, strict=True)]
    factor = (sum(kind.returns) + _PRIOR_RETURNS) / (sum(expected) + _PRIOR_RETURNS)
    hazard: list[float] = []
    for zone in range(_ZONES):
        part = slice(zone * _COUNT // _ZONES, (zone + 1) * _COUNT // _ZONES)
        own = (sum(kind.returns[part]) + _PRIOR_RETURNS * factor) / (sum(expected[part]) + _PRIOR_RETURNS)
        hazard += [min(0.95, own * p) for p in pool[part]]
    return hazard


def _worth(hazard: list[float]) -> list[float]:
    worth = []
    for start in BUCKETS:
        there, hits, seconds, best = 1.0, 0.0, 0.0, 0.0
        for bucket in range(start, _COUNT):
            gone = there * hazard[bucket]
            hits += gone
            seconds += (there - gone / 2) * _WIDTHS[bucket]
            there -= gone
            best = max(best, hits / seconds)
        worth.append(best)
    return worth
