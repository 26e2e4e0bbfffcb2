"""A small fleet for tests: a cluster with a fake clock's time as an argument and a seeded choice."""

from __future__ import annotations

import random

from moonpool.conductor.chain import KeyChain
from moonpool.conductor.cluster import Cluster, Member
from moonpool.conductor.index import PrefixIndex
from moonpool.conductor.ledger import Ledger
from moonpool.conductor.perf import PerfModel
from moonpool.conductor.types import SLO, Request

BLOCK = 512
PERF = PerfModel(prefill=(0.0, 1e-3, 0.0), decode=(0.01, 0.001, 1e-6), bandwidth=1e9, kv_bytes_per_token=1e5)
"""A millisecond a token; a tenth of one to move it."""


def fleet(count: int = 4, *, seed: int = 1, perf: PerfModel = PERF, decode: int = 0) -> Cluster:
    """`count` instances `p0…` that do both, or prefill alone with `decode` others `d0…`."""
    rng = random.Random(seed)
    cluster = Cluster(PrefixIndex(rng), Ledger(rng), rng, fresh_s=0.0)
    for i in range(count):
        cluster.join(Member(f"p{i}", True, not decode, perf), 0.0)
    for i in range(decode):
        cluster.join(Member(f"d{i}", False, True, perf, capacity_tokens=100_000), 0.0)
    return cluster


def chain(blocks: int, seed: int = 0, prefix: int = 0) -> KeyChain:
    """`prefix` blocks that all seeds share, then some of its own."""
    shared, own = random.Random(99), random.Random(seed)
    return KeyChain(
        [shared.getrandbits(64) | 1 for _ in range(prefix)] + [own.getrandbits(64) | 1 for _ in range(blocks - prefix)]
    )


def request(blocks: int = 8, seed: int = 0, prefix: int = 0, **more: object) -> Request:
    found = chain(blocks, seed, prefix)
    fields = {
        "id": f"r{seed}",
        "model": "m",
        "chain": found,
        "tokens": blocks * BLOCK + 7,
        "output_tokens": 100,
        "slo": SLO(),
        **more,
    }
    return Request(**fields)  # type: ignore[arg-type]
