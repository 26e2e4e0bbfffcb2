"""Shadow checks in the engine: a converted request, computed again natively when there is nothing else to do.

    prefill of a converted request ─► sampled? ─► kept: prompt and first logits        model thread, one at a time
    model thread idle              ─► one chunk of the native prefill, and so on       a new request waits for one chunk at most
    the whole prompt computed      ─► KL and top-1 of the first token ─► `EngineRules` (drift alarm)

A check has a cache of its own and neither reads from the pool nor writes to it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from moonpool.c2c.shadow import sampled
from moonpool.engine.cache import SequenceKV
from moonpool.engine.model import Runner
from moonpool.engine.rules import EngineRules

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper bounds of the histogram of KLs, nats."""
Histogram: TypeAlias = tuple[list[tuple[str, float]], float]
"""(upper bound, checks up to it) of each bucket, and the sum of all KLs: as Prometheus takes it."""


@dataclass(slots=True)
class _Job:
    bundle: str
    prompt: list[int]
    converted: Tensor
    """Logits `[vocab]` of the first token, over converted pages."""
    kv: SequenceKV | None = None


class ShadowChecks:
    """At most one check at a time; requests that would be sampled meanwhile are counted and let go. One thread's."""

    def __init__(self, runner: Runner, rules: EngineRules, chunk: int, random: Random) -> None:
        self._runner, self._rules, self._chunk, self._random = runner, rules, chunk, random
        self._job: _Job | None = None
        self.skipped = 0
        self._kls = Counter[float]()  # checks by the smallest bucket that holds their KL
        self._kl_sum = 0.0

    @property
    def due(self) -> bool:
        return self._job is not None

    def histogram(self) -> Histogram:
        """What was found so far."""
        counts: list[tuple[str, float]] = []
        below = 0
        for bound in (*BUCKETS, math.inf):
            below += self._kls[bound]
            counts.append((str(bound) if bound < math.inf else "+Inf", below))
        return counts, self._kl_sum

    def offer(self, bundles: tuple[str, ...], prompt: list[int], logits: Tensor) -> None:
        """A request was prefilled over pages of these bundles, and `logits` `[vocab]` say its first token. Pages of several
        bundles in one prompt would tell nothing of any of them."""
        rule = self._rules[bundles[0]] if len(bundles) == 1 else None
        if rule is None or not sampled(rule.shadow, self._random):
            return
        if self._job is not None:
            self.skipped += 1
        else:
            self._job = _Job(rule.digest, list(prompt), logits.clone())

    def step(self) -> None:
        """One chunk; behind the last one, the verdict."""
        job = self._job
        assert job is not None
        self._job = None  # a check that fails is gone
        if job.kv is None:
            job.kv = self._runner.new_sequence(len(job.prompt))
        at = job.kv.length
        tokens = job.prompt[at : at + self._chunk]
        logits = self._runner.forward([job.kv], [tokens], keep=1)[0]
        if job.kv.length < len(job.prompt):
            self._job = job
        else:
            self._compare(job, logits[-1])

    def _compare(self, job: _Job, native: Tensor) -> None:
        kl, same = divergence(native, job.converted)
        self._kls[next((b for b in BUCKETS if kl <= b), math.inf)] += 1
        self._kl_sum += kl
        self._rules.checked(job.bundle, kl, same)


def divergence(native: Tensor, other: Tensor) -> tuple[float, bool]:
    """KL(native ‖ other) in nats, and whether both would choose the same token. Logits `[vocab]`."""
    kl = kl_div(log_softmax(other.double(), -1), log_softmax(native.double(), -1), log_target=True, reduction="sum")
    return float(kl), bool(native.argmax() == other.argmax())
