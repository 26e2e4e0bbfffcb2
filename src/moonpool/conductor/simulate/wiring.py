"""The live classes as a simulation's brain: the same index, ledger, policies, admission and scheduler that the server runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from moonpool.conductor import policies
from moonpool.conductor.caches import named
from moonpool.conductor.cluster import Cluster, Member
from moonpool.conductor.index import PrefixIndex
from moonpool.conductor.ledger import Ledger
from moonpool.conductor.scheduler import Booked, Scheduler
from moonpool.conductor.simulate.brain import Copy
from moonpool.conductor.simulate.case import Case
from moonpool.conductor.simulate.engine import Engine, Run, Setup
from moonpool.conductor.simulate.trace import BLOCK, Trace
from moonpool.conductor.types import InstanceId, Plan, Refusal, Request


class LiveBooking:
    """A booking of the live scheduler."""

    def __init__(self, booked: Booked) -> None:
        self._booked = booked

    @property
    def plan(self) -> Plan:
        return self._booked.plan

    def started(self, now: float) -> None:
        self._booked.started(now)

    def first_token(self, now: float) -> None:
        self._booked.first_token(now)

    def decode(self, now: float) -> Refusal | None:
        return None

    def finished(self, now: float) -> None:
        self._booked.finished(now)

    def failed(self, now: float) -> None:
        self._booked.failed(now)


class LiveBrain:
    def __init__(self, setup: Setup, scheduler: Scheduler) -> None:
        self._setup, self._scheduler, self._cluster = setup, scheduler, scheduler.cluster
        for instance in (*setup.prefill_ids, *setup.decode_ids):
            self.joined(instance, 0.0)

    def decide(self, request: Request, now: float) -> LiveBooking | Refusal:
        answer = self._scheduler.decide(request, now)
        return answer if isinstance(answer, Refusal) else LiveBooking(answer)

    def cached(self, instance: InstanceId, added: Sequence[int], evicted: Sequence[int], now: float) -> None:
        if instance in self._cluster.members:
            self._cluster.index.insert(instance, added)
            self._cluster.index.remove(instance, evicted)

    def died(self, instance: InstanceId, now: float) -> None:
        self._cluster.leave(instance)

    def joined(self, instance: InstanceId, now: float) -> None:
        machine = self._setup.machine
        prefill = instance in self._setup.prefill_ids
        member = Member(
            instance,
            prefill=prefill,
            decode=not prefill,
            perf=machine.perf,
            capacity_tokens=0 if prefill else machine.decode_tokens,
            guesses=False,
        )
        self._cluster.join(member, now, cache_blocks=machine.cache_tokens // BLOCK if prefill else 0)

    def copies(self, now: float) -> Sequence[Copy]:
        return ()


def run(case: Case, trace: Trace, progress: Callable[[int], None] = lambda done: None) -> Run:
    """Play a trace with a case's policy. The same case and trace give the same numbers."""
    random = Random(case.seed)
    cluster = Cluster(PrefixIndex(random), Ledger(random), random)
    scheduler = Scheduler(cluster, policies.named(case.policy, random), remember=1)
    finished = Engine(case.setup, LiveBrain(case.setup, scheduler), named(case.cache)).run(trace, progress)
    cluster.ledger.check()
    return finished
