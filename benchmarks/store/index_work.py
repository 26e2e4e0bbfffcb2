"""The index under many keys: what a client process does for it. Numpy only, see `workload`."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from benchmarks.store.workload import SMALL, Side, keys_of, percentile, timed, until

_BATCH = 1000
_LOOKUP = 2048
_SAMPLES = 400


def fill(side: Side, label: str, first: int, count: int) -> float:
    """Put keys `first` to `first + count`, in batches; seconds of the calls alone."""
    spent = 0.0
    for start in range(first, first + count, _BATCH):
        size = min(_BATCH, first + count - start)
        pieces = side.pieces(side.source, [i * SMALL for i in range(size)], SMALL)
        spent += timed(partial(side.put, keys_of(label, size, start), pieces))
    return spent


def appears(side: Side, label: str, number: int, timeout: float) -> float | None:
    """Seconds until this client, whose home is another messenger, is told that the key exists; None if it is not in time."""
    key = keys_of(label, 1, number)[0]
    return until(lambda: side.exist_one(key), timeout)


def calls(side: Side, label: str, count: int) -> dict[str, float]:
    """Microseconds a key of each call while `count` keys of `label` are there, taken at random among them."""
    numbers = random.Random(count)
    some = [keys_of(label, 1, numbers.randrange(count))[0] for _ in range(_LOOKUP)]
    fresh = keys_of(f"{label}:fresh:{count}", _SAMPLES)
    return {
        "lookup": _median(lambda: side.exist(some), 20) / _LOOKUP,
        "exist": 1e6 * timed(lambda: [side.exist_one(k) for k in some]) / _LOOKUP,
        "get": 1e6 * percentile([timed(partial(side.get_one, k, 0, SMALL)) for k in some[:_SAMPLES]], 0.5),
        "put": 1e6 * percentile([timed(partial(side.put_one, k, 0, SMALL)) for k in fresh], 0.5),
    }


def _median(action: Callable[[], object], repeats: int) -> float:
    return 1e6 * percentile([timed(action) for _ in range(repeats)], 0.5)
