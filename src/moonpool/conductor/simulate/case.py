"""One simulated run by its parameters, and what is kept of it. Both are plain data: runs go to other processes as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec
import numpy as np

from moonpool.conductor.perf import Machine as Hardware
from moonpool.conductor.perf import PerfModel
from moonpool.conductor.simulate.engine import Failure, Load, Result, Run, Setup
from moonpool.conductor.simulate.machine import Machine
from moonpool.conductor.types import SLO

TBT_LIMITS_MS = (50, 100, 200, 300, 500, 1000)


REPLICATE_S = 10.0
"""Between two looks for hot prefixes."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    trace: str
    """Path of a trace file."""
    policy: str = "kvcache"
    prefill: int = 8
    decode: int = 8
    speed: float = 1.0
    admission: str = "off"
    """off, or how requests are refused: baseline, early, predict."""
    cache: str = "lru"
    nic_gbit_s: float = 320.0
    slo: SLO = SLO()
    seed: int = 0
    limit: int | None = None
    """First so many requests of the trace."""
    one_token: bool = False
    """Answers have one token, as where only prefill is of interest."""
    replicate: bool = False
    """Copy hot prefixes, besides what transfers leave behind."""
    watched: tuple[int, ...] = ()
    failures: tuple[Failure, ...] = ()

    @property
    def setup(self) -> Setup:
        return Setup(
            prefill=self.prefill,
            decode=self.decode,
            machine=Machine(perf=PerfModel.of(Hardware(link=self.nic_gbit_s * 1e9 / 8))),
            slo=self.slo,
            watched=self.watched,
            failures=self.failures,
            replicate_s=REPLICATE_S if self.replicate else 0.0,
        )


class Spread(msgspec.Struct, frozen=True):
    """Of a time in seconds over requests."""

    mean: float
    q1: float
    median: float
    q3: float
    p90: float
    p99: float
    low: float
    """Whiskers of a box: 5th and 95th percentile."""
    high: float


def spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(*[0.0] * 8)
    q1, median, q3, p90, p99, low, high = (float(x) for x in np.percentile(values, [25, 50, 75, 90, 99, 5, 95]))
    return Spread(fmean(values), q1, median, q3, p90, p99, low, high)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    done: int
    refused: int
    refused_after: int
    failed: int
    ttft: Spread
    """Of requests that were prefilled."""
    within_ttft: float
    """Share of all requests with their first token within the limit."""
    good: float
    """Share of all requests that ended within both limits."""
    hit: float
    """Share of prefilled tokens that a cache held."""
    prefill_s: float
    """Node seconds for each prefilled request."""
    wasted_s: float
    """Node seconds of prefill whose answer never came."""
    tbt: Spread
    tbt_within: dict[int, float]
    """Share of finished requests whose time between tokens is within so many ms."""
    correlation: float
    """Of both pools' load over time."""
    prediction_error: float
    """Median of |predicted - measured| / measured TTFT of those over 0.5 s."""
    load: list[Load]
    replicas: list[tuple[float, list[int]]]
    busiest: float
    """Requests of the busiest prefill instance to the mean."""


def summarise(run: Run, case: Case) -> Summary:
    results, slo = run.results, case.slo
    prefilled = [r for r in results if r.prefill_s > 0]
    done = [r for r in results if r.outcome == "done"]
    outcomes = [r.outcome for r in results]
    shares = {ms: _share(sum(r.tbt * 1000 <= ms for r in done), len(done)) for ms in TBT_LIMITS_MS}
    last = results[-1].arrived
    loads = [x for x in run.load if x.at <= last]
    return Summary(
        requests=len(results),
        done=len(done),
        refused=outcomes.count("refused"),
        refused_after=outcomes.count("refused after prefill"),
        failed=outcomes.count("failed"),
        ttft=spread([r.ttft for r in prefilled]),
        within_ttft=_share(sum(r.ttft <= slo.ttft_s for r in prefilled), len(results)),
        good=_share(sum(r.ttft <= slo.ttft_s and r.tbt <= slo.tbt_s for r in done), len(results)),
        hit=_share(sum(r.cached for r in prefilled), sum(r.tokens for r in prefilled)),
        prefill_s=_share(sum(r.prefill_s for r in prefilled), len(prefilled)),
        wasted_s=sum(r.prefill_s for r in prefilled if r.outcome != "done"),
        tbt=spread([r.tbt for r in done]),
        tbt_within=shares,
        correlation=_correlation([x.prefill for x in loads], [x.decode for x in loads]),
        prediction_error=_prediction_error(prefilled),
        load=run.load,
        replicas=run.replicas,
        busiest=_busiest(prefilled, case.prefill),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _correlation(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) < 3 or np.std(a) == 0 or np.std(b) == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _prediction_error(results: Sequence[Result]) -> float:
    errors = [abs(r.predicted_ttft - r.ttft) / r.ttft for r in results if r.ttft > 0.5]
    return float(np.median(errors)) if errors else 0.0


def _busiest(results: Sequence[Result], instances: int) -> float:
    counts: dict[str, int] = {}
    for r in results:
        counts[r.prefill] = counts.get(r.prefill, 0) + 1
    return max(counts.values(), default=0) * instances / len(results) if results else 0.0
