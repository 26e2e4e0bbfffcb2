"""Hit rates of one cache for all requests, by policy and capacity: no clock, no instances."""

from __future__ import annotations

import msgspec

from moonpool.conductor.caches import Belady, BlockCache, named
from moonpool.conductor.simulate.trace import BLOCK, Trace


class HitRate(msgspec.Struct, frozen=True):
    """Shares of a trace that a cache held: of its blocks, of its tokens, and of a request's blocks on average over requests."""

    block: float
    token: float
    request: float


def hit_rate(trace: Trace, policy: str, capacity: int | None) -> HitRate:
    """`capacity` in blocks, None for an endless one. `policy` is a name of `caches` or "belady"."""
    size = capacity if capacity is not None else 1 << 60
    cache: BlockCache = Belady(size, trace.keys) if policy == "belady" else named(policy)(size)
    hits = blocks = hit_tokens = 0
    share = 0.0
    for a in trace.arrivals:
        found = cache.access(a.keys, a.at).hits
        hits += found
        blocks += len(a.keys)
        hit_tokens += min(found * BLOCK, a.tokens)
        share += found / len(a.keys)
    return HitRate(hits / blocks, hit_tokens / trace.tokens, share / len(trace.arrivals))
