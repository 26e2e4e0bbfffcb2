"""What a client process does while others die. Numpy only, see `workload`."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.store.workload import PAUSE_S, Side, keys_of, until


def store(side: Side, label: str, count: int, size: int) -> None:
    """Put `count` values; the i-th is the source from `i * size` on."""
    for i, key in enumerate(keys_of(label, count)):
        side.put_one(key, i * size, size)


def readable(side: Side, label: str, count: int, size: int) -> int:
    """How many of them are read back with the right bytes."""
    right = 0
    for i, key in enumerate(keys_of(label, count)):
        side.target[:size] = 0
        if _works(side, lambda key=key: side.get_one(key, 0, size)):  # type: ignore[misc]
            right += bool((side.target[:size] == side.source[i * size : (i + 1) * size]).all())
    return right


def hammer(side: Side, label: str, count: int, size: int, seconds: float) -> dict[str, float]:
    """Put, get and probe for so long: how many gets and puts succeeded, and the longest call of each kind in seconds."""
    keys = keys_of(label, count)
    longest = {"put": 0.0, "get": 0.0, "exist": 0.0}
    good = {"put": 0, "get": 0, "exist": 0}
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        key, fresh = keys[rounds % count], keys_of(f"{label}:{rounds}", 1)[0]
        calls: dict[str, Callable[[], object]] = {
            "put": lambda k=fresh: side.put_one(k, 0, size),  # type: ignore[misc]
            "get": lambda k=key: side.get_one(k, 0, size),  # type: ignore[misc]
            "exist": lambda k=key: side.exist_one(k),  # type: ignore[misc]
        }
        for name, call in calls.items():
            start = time.monotonic()
            good[name] += _works(side, call)
            longest[name] = max(longest[name], time.monotonic() - start)
        rounds += 1
        time.sleep(PAUSE_S)
    found: dict[str, float] = {"rounds": rounds}
    found |= {f"{n}_ok": v for n, v in good.items()}
    return found | {f"{n}_longest_s": v for n, v in longest.items()}


def first_put(side: Side, label: str, size: int, timeout: float) -> float | None:
    """Seconds until a put succeeds; None if none does in time."""
    key = keys_of(label, 1)[0]
    return until(lambda: _works(side, lambda: side.put_one(key, 0, size)), timeout)


def gone(side: Side, label: str, count: int, timeout: float) -> float | None:
    """Seconds until none of the keys is said to exist; None if some still is after `timeout`."""
    keys = keys_of(label, count)
    return until(lambda: not any(side.exist(keys)), timeout)


def _works(side: Side, call: Callable[[], object]) -> bool:
    try:
        call()
    except side.failures:
        return False
    return True
