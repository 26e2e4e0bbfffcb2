"""Many small objects: what a key costs in memory, and whether calls get slower as there are more."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks import figures
from benchmarks.store.plan import Plan
from benchmarks.store.sides import Sides, Worker, rss

_PEER_KEYS = 200_000
_CALLS = ("lookup", "exist", "get", "put")
_ROOM = 1.25
"""Limits of the messenger, over what the run needs."""


def index(plan: Plan) -> dict[str, object]:
    """Memory of messenger and master a key, rates as the number of keys grows; the peer's master beside it."""
    found: dict[str, object] = {}
    with Sides(plan.peer) as sides:
        steps = [n for n in (10_000, 100_000, 1_000_000, 10_000_000) if n < plan.keys] + [plan.keys]
        nodes = sides.nodes(2, capacity=_segment(plan.keys), max_objects=int(_ROOM * plan.keys) + 10_000)
        worker = sides.ours_client(nodes, 0, 4 << 20)
        other = sides.ours_client(nodes, 1, 4 << 20)
        rows = _grow(worker, other, {"messenger": nodes.messengers[0].pid, "master": nodes.master.pid}, steps)
        found |= _report("ours", rows)
        found["index_bytes_per_key"] = rows[-1]["messenger"] + rows[-1]["master"]
    if plan.peer:
        with Sides(plan.peer) as sides:
            master = sides.peer_master()
            holder = sides.peer_client(master, _segment(_PEER_KEYS), 0)
            worker, other = (sides.peer_client(master, 0, 4 << 20) for _ in range(2))
            count = min(_PEER_KEYS, plan.keys)
            rows = _grow(worker, other, {"master": master.process.pid, "holder": holder.pid}, [count // 10, count])
            found |= _report("peer", rows)
    return found


def _segment(keys: int) -> int:
    return max(256 << 20, int(keys * 64 * _ROOM) >> 20 << 20)


def _grow(worker: Worker, other: Worker, pids: dict[str, int], steps: Sequence[int]) -> list[dict[str, float]]:
    """One row per step: keys, rate of puts since the last step, seconds until others see the last of them, bytes a key of each
    process, microseconds of calls once all is quiet."""
    before = {name: rss(pid) for name, pid in pids.items()}
    rows, there = [], 0
    for step in steps:
        spent = worker.do("fill", label="i", first=there, count=step - there)
        row: dict[str, float] = {"keys": step, "puts_per_s": (step - there) / spent}
        there = step
        seen = other.do("appears", label="i", number=step - 1, timeout=120.0)
        assert seen is not None, "another client was never told of the last key"
        row["seen_by_others_s"] = seen
        row |= {name: (rss(pid) - before[name]) / step for name, pid in pids.items()}
        rows.append(row | worker.do("calls", label="i", count=step))
    return rows


def _report(side: str, rows: list[dict[str, float]]) -> dict[str, object]:
    names = [n for n in rows[0] if n not in ("keys", "puts_per_s", "seen_by_others_s", *_CALLS)]
    figures.show(
        f"{side}: objects of 64 B, keys of 49 characters; bytes of memory a key; µs a call (lookup: a key, 2048 a call)",
        [
            (
                f"{row['keys']:,.0f}",
                f"{row['puts_per_s']:,.0f}",
                f"{row['seen_by_others_s']:.2f}",
                *(f"{row[n]:,.0f} B" for n in names),
                *(f"{row[c]:.2f}" for c in _CALLS),
            )
            for row in rows
        ],
        ("keys", "batched puts/s", "seen after s", *names, *_CALLS),
    )
    first, last = rows[0], rows[-1]
    allowed = math.log(last["keys"]) / math.log(first["keys"])
    growth = {c: last[c] / first[c] for c in _CALLS}
    text = ", ".join(f"{c} {g:.2f}×" for c, g in growth.items())
    print(
        f"{side}: from {first['keys']:,.0f} to {last['keys']:,.0f} keys a call takes {text} (log n: {allowed:.2f}×)\n"
    )
    found: dict[str, object] = {f"index_{side}_{c}_growth": g for c, g in growth.items()}
    found |= {f"index_{side}_{n}_bytes_per_key": last[n] for n in names}
    return found | {f"index_{side}_{n}": last[n] for n in ("keys", "puts_per_s", "seen_by_others_s", *_CALLS)}
