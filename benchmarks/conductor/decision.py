"""Lookup, plan and book at 10⁷ blocks, 1000 instances and prompts of 128 Ki tokens, in one process.

decision_p99_us        one decision, 99th percentile
decisions_per_s        decisions one after another, their ends included
index_bytes_per_block  table, sets and guesses of the prefix index over its blocks
"""

from __future__ import annotations

import random
import resource
import time

import numpy as np

from benchmarks import figures
from moonpool.conductor.chain import Context, TokenChain
from moonpool.conductor.cluster import Cluster, Member
from moonpool.conductor.index import PrefixIndex
from moonpool.conductor.ledger import Ledger
from moonpool.conductor.perf import Machine, PerfModel
from moonpool.conductor.policies import named
from moonpool.conductor.scheduler import Booked, Scheduler
from moonpool.conductor.types import Request

INSTANCES = 1000
BLOCK = 512
TOKENS = 128 * 1024
DOCUMENTS = 64
DECISIONS = 3000


def measure(blocks: int) -> dict[str, float]:
    rng, numbers = random.Random(0), np.random.default_rng(0)
    cluster, before = _cluster(rng), _resident()
    documents = [numbers.integers(0, 150_000, TOKENS).tolist() for _ in range(DOCUMENTS)]
    context = Context("", "m", block_size=BLOCK)
    _hold(cluster.index, documents, context, rng)
    began, filled = time.perf_counter(), _fill(cluster.index, blocks, numbers)
    fill_s, grown = time.perf_counter() - began, _resident() - before
    scheduler = Scheduler(cluster, named("kvcache", rng))
    times = sorted(_decisions(scheduler, documents, context, rng))
    rate = _rate(scheduler, documents, context, rng)
    found = {
        "decision_p50_us": 1e6 * times[len(times) // 2],
        "decision_p99_us": 1e6 * times[int(0.99 * len(times))],
        "decisions_per_s": rate,
        "index_blocks": float(cluster.index.blocks),
        "index_bytes_per_block": cluster.index.nbytes / cluster.index.blocks,
        "index_resident_bytes_per_block": grown / cluster.index.blocks,
        "index_inserts_per_s": filled / fill_s,
    }
    rows = [(name, f"{value:,.1f}") for name, value in found.items()]
    figures.show(f"{INSTANCES} instances, prompts of {TOKENS} tokens in blocks of {BLOCK}", rows, ("figure", "value"))
    return found


def _cluster(rng: random.Random) -> Cluster:
    model = PerfModel.of(Machine())
    cluster = Cluster(PrefixIndex(rng, max_bytes=1 << 30), Ledger(rng), rng, fresh_s=0.0)
    for i in range(INSTANCES):
        cluster.join(Member(f"i{i}", True, True, model, guesses=True), 0.0)
    return cluster


def _hold(index: PrefixIndex, documents: list[list[int]], context: Context, rng: random.Random) -> None:
    """Each document lies whole on four instances, and in part on as many more."""
    for tokens in documents:
        chain = TokenChain(tokens, context)
        keys = np.array([chain.key(i) for i in range(len(chain))], np.uint64)
        for i in range(8):
            index.insert(f"i{rng.randrange(INSTANCES)}", keys if i < 4 else keys[: rng.randrange(1, len(keys))])


def _fill(index: PrefixIndex, blocks: int, numbers: np.random.Generator) -> int:
    """Blocks of other prompts, a run of 256 on one or two instances."""
    run = 256
    for _ in range(0, blocks - index.blocks, run):
        keys = numbers.integers(1, 2**63, run, np.uint64)
        for i in numbers.integers(0, INSTANCES, 1 + int(numbers.integers(2))):
            index.insert(f"i{i}", keys)
    return blocks


def _request(tokens: list[int], context: Context, n: int) -> Request:
    return Request(id=str(n), model="m", chain=TokenChain(tokens, context), tokens=len(tokens), block_size=BLOCK)


def _prompts(documents: list[list[int]], rng: random.Random, count: int) -> list[list[int]]:
    """Half go on with a document that is held, half end somewhere in it and go another way."""
    found = []
    for _ in range(count):
        whole = documents[rng.randrange(len(documents))]
        cut = TOKENS if rng.random() < 0.5 else rng.randrange(1, TOKENS)
        found.append(whole if cut == TOKENS else [*whole[:cut], *whole[: TOKENS - cut]])
    return found


def _decisions(scheduler: Scheduler, documents: list[list[int]], context: Context, rng: random.Random) -> list[float]:
    """Seconds of each decision; the prompt's conversion to 32-bit numbers is not in them."""
    found, now = [], 0.0
    for n, tokens in enumerate(_prompts(documents, rng, DECISIONS)):
        request = _request(tokens, context, n)
        began = time.perf_counter()
        booked = scheduler.decide(request, now)
        found.append(time.perf_counter() - began)
        assert isinstance(booked, Booked)
        now += 0.01
        booked.first_token(now)
        booked.finished(now)
    return found


def _rate(scheduler: Scheduler, documents: list[list[int]], context: Context, rng: random.Random) -> float:
    requests = [_request(tokens, context, n) for n, tokens in enumerate(_prompts(documents, rng, DECISIONS))]
    began, now = time.perf_counter(), 1e6
    for request in requests:
        booked = scheduler.decide(request, now)
        assert isinstance(booked, Booked)
        booked.finished(now)
        now += 0.01
    return DECISIONS / (time.perf_counter() - began)


def _resident() -> int:
    """Bytes, at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
