"""What the simulated machines can do. Times are the performance model's: the paper's node (its Table 1) unless told otherwise."""

from __future__ import annotations

import msgspec

from moonpool.conductor.perf import Machine as Hardware
from moonpool.conductor.perf import PerfModel


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Of one node, be it for prefill or for decode."""

    perf: PerfModel = PerfModel.of(Hardware())
    cache_tokens: int = 3_000_000
    """That a prefill node's cache holds."""
    decode_tokens: int = 1_500_000
    """KV that a decode node holds: what the weights leave of 640 GB."""
    event_delay_s: float = 0.0
    """Until the conductor knows what a cache took in or let go."""
