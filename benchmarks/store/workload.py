"""What is measured: the same loops over both sides. Imports numpy only, because it also runs in the peer's environment.

One pass puts as many distinct keys as fill the source buffer (larger than the last-level cache), gets them all, compares every
byte, and removes them. Only the calls are timed; keys and argument lists are made before.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

KEY_LENGTH = 49
"""Characters of a key: a digest and a suffix, as engines use."""
BATCH = 128
PAUSE_S = 0.01
"""Between two looks at something that is waited for."""
SMALL = 64
"""Bytes of a value where only the key matters."""


def keys_of(label: str, count: int, first: int = 0) -> list[str]:
    """`count` keys of `KEY_LENGTH` characters; another label gives others, and so does another range of numbers."""
    return [hashlib.blake2b(f"{label}:{i}".encode()).hexdigest()[:KEY_LENGTH] for i in range(first, first + count)]


def percentile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class Side(ABC):
    """One store as a client process sees it. `source` and `target` are buffers that the store may read and write directly."""

    source: np.ndarray
    target: np.ndarray
    failures: tuple[type[Exception], ...] = (AssertionError,)
    """What a call raises that did not succeed."""

    @abstractmethod
    def pieces(self, buffer: np.ndarray, starts: Sequence[int], size: int) -> Any:
        """Arguments for `put` or `get`: the pieces of `buffer` at `starts`, in the form that this store takes."""

    @abstractmethod
    def put(self, keys: list[str], pieces: Any) -> None:
        """One batch; fails unless all were stored."""

    @abstractmethod
    def get(self, keys: list[str], pieces: Any) -> None:
        """One batch; fails unless each key filled its piece."""

    @abstractmethod
    def put_one(self, key: str, start: int, size: int) -> None: ...

    @abstractmethod
    def get_one(self, key: str, start: int, size: int) -> None: ...

    @abstractmethod
    def exist(self, keys: list[str]) -> list[bool]: ...

    @abstractmethod
    def exist_one(self, key: str) -> bool: ...

    @abstractmethod
    def clear(self, keys: list[str]) -> None:
        """Remove these keys, which are all that there are."""

    @abstractmethod
    def close(self) -> None: ...


def fill(source: np.ndarray) -> None:
    """Bytes of which no two regions of a value's size are equal."""
    source[:] = np.random.default_rng(7).integers(0, 256, source.nbytes, dtype=np.uint8)


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def until(condition: Callable[[], bool], timeout: float) -> float | None:
    """Seconds until the condition holds; None if it does not within `timeout`."""
    start = time.perf_counter()
    while not condition():
        if time.perf_counter() - start > timeout:
            return None
        time.sleep(PAUSE_S)
    return time.perf_counter() - start


@dataclass
class Pass:
    """One pass: `count` values of `size` bytes that fill the buffers. Values lie elsewhere in the source than in the target, and
    elsewhere in each pass, so that bytes of another pass cannot be taken for right ones."""

    side: Side
    label: str
    size: int
    count: int
    shift: int

    def __post_init__(self) -> None:
        self.keys = keys_of(f"{self.label}:{self.shift}", self.count)
        self.sources = [(i + self.shift) % self.count * self.size for i in range(self.count)]
        self.targets = [i * self.size for i in range(self.count)]

    def batches(self) -> tuple[list[float], list[float]]:
        """Seconds of each batched put and of each batched get."""
        cuts = [slice(i, i + BATCH) for i in range(0, self.count, BATCH)]
        side, size = self.side, self.size
        return self._run(
            [partial(side.put, self.keys[c], side.pieces(side.source, self.sources[c], size)) for c in cuts],
            [partial(side.get, self.keys[c], side.pieces(side.target, self.targets[c], size)) for c in cuts],
        )

    def singles(self) -> tuple[list[float], list[float]]:
        """Seconds of each single put and of each single get."""
        side, size = self.side, self.size
        return self._run(
            [partial(side.put_one, k, s, size) for k, s in zip(self.keys, self.sources, strict=True)],
            [partial(side.get_one, k, s, size) for k, s in zip(self.keys, self.targets, strict=True)],
        )

    def _run(
        self, puts: Sequence[Callable[[], None]], gets: Sequence[Callable[[], None]]
    ) -> tuple[list[float], list[float]]:
        put, get = [timed(p) for p in puts], [timed(g) for g in gets]
        self._check()
        self.side.clear(self.keys)
        return put, get

    def _check(self) -> None:
        whole = self.count * self.size
        got = self.side.target[:whole].reshape(self.count, self.size)
        put = self.side.source[:whole].reshape(self.count, self.size)
        wrong = sum(not np.array_equal(put[(i + self.shift) % self.count], got[i]) for i in range(self.count))
        assert not wrong, f"{wrong} of {self.count} values came back with wrong bytes"


def batch_rate(side: Side, label: str, size: int, passes: int, first: int) -> dict[str, float]:
    """GiB/s of batched puts and gets over `passes` passes."""
    count = side.source.nbytes // size
    put, get = [], []
    for shift in range(first, first + passes):
        p, g = Pass(side, label, size, count, shift).batches()
        put += p
        get += g
    total = passes * count * size / (1 << 30)
    return {"put": total / sum(put), "get": total / sum(get)}


def single_times(side: Side, label: str, size: int, count: int, first: int) -> dict[str, float]:
    """Microseconds of single calls."""
    put, get = Pass(side, label, size, count, first).singles()
    return {
        f"{name}_p{q}": 1e6 * percentile(values, q / 100)
        for name, values in (("put", put), ("get", get))
        for q in (50, 99)
    }


def exist_rate(side: Side, label: str, count: int, repeats: int) -> dict[str, float]:
    """Keys per second: `count` keys that are there, one call each, and all in one call, `repeats` times."""
    keys = keys_of(label, count)
    side.put(keys, side.pieces(side.source, [i * SMALL for i in range(count)], SMALL))
    single = timed(lambda: [side.exist_one(k) for k in keys])
    batched = timed(lambda: [side.exist(keys) for _ in range(repeats)])
    assert all(side.exist(keys))
    assert not side.exist_one("none of these")
    side.clear(keys)
    return {"single": count / single, "batch": count * repeats / batched}
