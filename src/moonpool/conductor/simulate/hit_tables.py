"""Tables and figures of hit rates: one cache for all requests (7.1 and Fig. 9 of the papers), Belady's bound among them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from moonpool.conductor.caches import NAMES
from moonpool.conductor.simulate import paper
from moonpool.conductor.simulate.hits import HitRate
from moonpool.conductor.simulate.table import Table, Value, beside
from moonpool.conductor.simulate.trace import BLOCK

GAP_BLOCKS = 10_000
"""Capacity at which policies are held against LRU and Belady."""
OURS = "survival"
POLICIES = (*NAMES, "belady")


class HitCase(msgspec.Struct, frozen=True):
    trace: str
    """Path of a trace file."""
    policy: str
    capacity: int | None
    """Blocks; None for an endless cache."""


Rates = Mapping[HitCase, HitRate]


def fig_9_blocks() -> tuple[int, ...]:
    return tuple(tokens // BLOCK for tokens in paper.FIG_9_TOKENS)


def hit_cases(traces: Mapping[str, str]) -> list[HitCase]:
    """Every hit rate that the tables need; `traces` are paths by name."""
    wanted = [HitCase(path, p, c) for path in traces.values() for p in POLICIES for c in paper.CAPACITIES if c]
    wanted += [HitCase(path, "lru", None) for path in traces.values()]
    wanted += [HitCase(path, "lru", c) for path in traces.values() for c in fig_9_blocks()]
    return list(dict.fromkeys(wanted))


def hit_tables(traces: Mapping[str, str], rates: Rates) -> list[Table]:
    return [
        *(_by_policy(name, path, rates) for name, path in traces.items()),
        *(_fig_9(name, path, rates) for name, path in traces.items() if name in paper.FIG_9),
        _gap_table(traces, rates),
    ]


def _by_policy(name: str, path: str, rates: Rates) -> Table:
    rows: list[tuple[Value, ...]] = []
    endless = rates[HitCase(path, "lru", None)].token
    for policy in POLICIES:
        ours = [endless if c is None else rates[HitCase(path, policy, c)].token for c in paper.CAPACITIES]
        rows.append((policy, *ours))
        theirs = paper.TABLE_1.get(policy)
        if theirs is not None:
            rows.append((f"  {policy}, paper's trace", *theirs))
            rows.append(("  difference", *(a - b for a, b in zip(ours, theirs, strict=True))))
    columns = ("policy", *("endless" if c is None else f"{c:,}" for c in paper.CAPACITIES))
    return Table(
        f"hit_by_policy_{name}",
        f"Share of tokens found in one cache of so many blocks of {BLOCK} tokens, {name} trace",
        columns,
        rows,
        "The paper's rows are of its own trace, which is not published with these; its length_aware is not defined there.",
    )


def _fig_9(name: str, path: str, rates: Rates) -> Table:
    rows: list[tuple[Value, ...]] = [
        (f"{tokens:,}", *beside(rates[HitCase(path, "lru", blocks)].token, theirs))
        for tokens, blocks, theirs in zip(paper.FIG_9_TOKENS, fig_9_blocks(), paper.FIG_9[name], strict=True)
    ]
    return Table(
        f"fig9_{name}",
        f"Hit rate by capacity, LRU, {name} trace (Fig. 9)",
        ("capacity, tokens", "ours", "paper", "difference"),
        rows,
    )


def fig_9_difference(name: str, path: str, rates: Rates) -> float:
    """Largest, in percentage points."""
    pairs = zip(fig_9_blocks(), paper.FIG_9[name], strict=True)
    return 100 * max(abs(rates[HitCase(path, "lru", blocks)].token - theirs) for blocks, theirs in pairs)


def gap_closed(path: str, policy: str, rates: Rates) -> float:
    """How far a policy comes from LRU (0) to Belady's bound (1) at `GAP_BLOCKS`, by tokens."""
    lru, ours, bound = (rates[HitCase(path, p, GAP_BLOCKS)].token for p in ("lru", policy, "belady"))
    return (ours - lru) / (bound - lru) if bound > lru else 0.0


def _gap_table(traces: Mapping[str, str], rates: Rates) -> Table:
    rows: list[tuple[Value, ...]] = [
        (policy, *(gap_closed(path, policy, rates) for path in traces.values())) for policy in POLICIES
    ]
    return Table(
        "policy_gap",
        f"Part of the way from LRU to Belady's bound at {GAP_BLOCKS:,} blocks",
        ("policy", *traces),
        rows,
    )
