"""Whether a plan is served now: a gate (`off`, `soft`, `hard`) around a test of predictions against the request's SLO.

Three tests ([A] §7 of the Mooncake report):

    baseline    prefill alone at arrival; the decode instance may refuse later, and the prefill was for nothing
    early       prefill and decode load as they are now: saves that work, but sees a decode pool that is one prefill old
    predict     decode load as it will be when this prefill ends: all that were promised a place are added, and a part will have
                ended, 1 − exp(−time / t_d). t_d is learnt: a fixed one that is 40 % too long halves goodput. The paper drops who
                has decoded for t_d, and leaves out whose prefill ends later: answers' lengths differ, and a promise to one whose
                turn comes later is broken just so.

A load is a predicted time over its limit. Higher priorities are let through at higher loads: the lowest is shed first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from moonpool.conductor.ledger import Lease
from moonpool.conductor.types import ClusterView, InstanceId, Plan, Refusal, Request
from moonpool.errors import ConfigError

_LEAST_RETRY_S, _LONGEST_RETRY_S = 1.0, 30.0
_STEP = 0.25
"""Load that each step of priority is let through beyond 1."""


class DecodeSets(Protocol):
    """What prediction needs beside a view."""

    def decoding(self, instance: InstanceId) -> Sequence[Lease]:
        """Leases on a decode instance, those included whose prefill has not ended."""
        ...

    def step_s(self, instance: InstanceId, batch: int, context: int) -> float: ...


@dataclass
class Residence:
    """How long a request decodes: an exponentially weighted mean of what was seen."""

    mean_s: float = 20.0
    weight: float = 0.05

    def ended(self, seconds: float) -> None:
        self.mean_s += self.weight * (seconds - self.mean_s)


class Test(Protocol):
    def loads(self, plan: Plan, request: Request, view: ClusterView) -> tuple[float, float]:
        """(prefill, decode), each a predicted time over its limit; 0 where it is not looked at."""
        ...


class Baseline:
    def loads(self, plan: Plan, request: Request, view: ClusterView) -> tuple[float, float]:
        return plan.predicted.ttft_s / request.slo.ttft_s, 0.0


@dataclass
class Early:
    sets: DecodeSets

    def loads(self, plan: Plan, request: Request, view: ClusterView) -> tuple[float, float]:
        batch, context = 1, request.tokens + request.output_tokens
        for lease in self.sets.decoding(plan.decode):
            if lease.stage == "decode":
                batch, context = batch + 1, context + lease.tokens
        tbt = self.sets.step_s(plan.decode, batch, context)
        return plan.predicted.ttft_s / request.slo.ttft_s, tbt / request.slo.tbt_s


@dataclass
class Predict:
    sets: DecodeSets
    residence: Residence = field(default_factory=Residence)

    def loads(self, plan: Plan, request: Request, view: ClusterView) -> tuple[float, float]:
        then = view.now + plan.predicted.ttft_s
        batch, context = 1.0, float(request.tokens + request.output_tokens)
        for lease in self.sets.decoding(plan.decode):
            begins = view.now if lease.stage == "decode" else max(lease.due, view.now)
            left = math.exp(min(0.0, begins - then) / self.residence.mean_s)
            batch, context = batch + left, context + left * lease.tokens
        tbt = self.sets.step_s(plan.decode, round(batch), round(context))
        return plan.predicted.ttft_s / request.slo.ttft_s, tbt / request.slo.tbt_s


class Hard:
    """Refuses what would miss its SLO."""

    def __init__(self, test: Test) -> None:
        self.test = test

    def admit(self, plan: Plan, request: Request, view: ClusterView) -> Plan | Refusal:
        prefill, decode = self.test.loads(plan, request, view)
        limit = 1 + _STEP * max(0, request.priority)
        if max(prefill, decode) <= limit:
            return plan
        return _refusal(plan, request, prefill, decode)


class Soft:
    """Serves it all the same, and says so."""

    def __init__(self, test: Test) -> None:
        self.test = test

    def admit(self, plan: Plan, request: Request, view: ClusterView) -> Plan | Refusal:
        prefill, decode = self.test.loads(plan, request, view)
        if max(prefill, decode) <= 1:
            return plan
        return replace(plan, why=f"{plan.why}; over its SLO: {_refusal(plan, request, prefill, decode).why}")


class Off:
    def admit(self, plan: Plan, request: Request, view: ClusterView) -> Plan | Refusal:
        return plan


def at_decode(plan: Plan, request: Request, tbt_s: float) -> Refusal | None:
    """The baseline's second test: a prefill has ended, and the decode instance looks again."""
    if tbt_s <= request.slo.tbt_s:
        return None
    why = f"time between tokens would be {tbt_s * 1000:.0f} ms, the limit is {request.slo.tbt_s * 1000:.0f} ms"
    return Refusal(stage="decode", why=why, retry_after_s=_LEAST_RETRY_S, predicted=plan.predicted)


def _refusal(plan: Plan, request: Request, prefill: float, decode: float) -> Refusal:
    p, slo = plan.predicted, request.slo
    if prefill >= decode:
        why = f"first token in {p.ttft_s:.2f} s, the limit is {slo.ttft_s:g} s"
        wait = p.ttft_s - slo.ttft_s
    else:
        why = f"time between tokens would be {decode * slo.tbt_s * 1000:.0f} ms, the limit is {slo.tbt_s * 1000:g} ms"
        wait = (decode - 1) * 10
    retry = min(_LONGEST_RETRY_S, max(_LEAST_RETRY_S, wait))
    return Refusal(stage="prefill" if prefill >= decode else "decode", why=why, retry_after_s=retry, predicted=p)


def named(gate: str, test: str, sets: DecodeSets, residence: Residence | None = None) -> Off | Soft | Hard:
    """`off`, `soft` or `hard` with `baseline`, `early` or `predict`. Raises ConfigError."""
    tests: dict[str, Test] = {
        "baseline": Baseline(),
        "early": Early(sets),
        "predict": Predict(sets, residence or Residence()),
    }
    if test not in tests:
        raise ConfigError("no such admission test", key=test, need=", ".join(tests))
    match gate:
        case "off":
            return Off()
        case "soft":
            return Soft(tests[test])
        case "hard":
            return Hard(tests[test])
    raise ConfigError("no such admission gate", key=gate, need="off, soft, hard")
