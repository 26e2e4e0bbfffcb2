"""The live classes as a simulation's brain: the same index, ledger, policies, admission and scheduler that the server runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from moonpool.conductor import admission, policies
from moonpool.conductor.caches import named
from moonpool.conductor.cluster import Cluster, Member
from moonpool.conductor.index import PrefixIndex
from moonpool.conductor.ledger import Lease, Ledger
from moonpool.conductor.replication import Replication
from moonpool.conductor.scheduler import Booked, Scheduler
from moonpool.conductor.simulate.brain import Copy
from moonpool.conductor.simulate.case import Case
from moonpool.conductor.simulate.engine import Engine, Run, Setup
from moonpool.conductor.simulate.trace import BLOCK, Trace
from moonpool.conductor.types import InstanceId, Plan, Refusal, Request


class DecodeSets:
    """`admission.DecodeSets` of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def decoding(self, instance: InstanceId) -> Sequence[Lease]:
        return self._cluster.ledger.decoding(instance)

    def step_s(self, instance: InstanceId, batch: int, context: int) -> float:
        return self._cluster.members[instance].perf.step_s(batch, context)


class LiveBooking:
    """A booking of the live scheduler, and the decode instance's own look at it."""

    def __init__(
        self, booked: Booked, request: Request, sets: DecodeSets, residence: admission.Residence | None
    ) -> None:
        self._booked, self._request, self._sets, self._residence = booked, request, sets, residence

    @property
    def plan(self) -> Plan:
        return self._booked.plan

    def started(self, now: float) -> None:
        self._booked.started(now)

    def first_token(self, now: float) -> None:
        self._booked.first_token(now)

    def decode(self, now: float) -> Refusal | None:
        if self._residence is None:
            return None
        plan, lease = self._booked.plan, self._booked.lease
        there = [x for x in self._sets.decoding(plan.decode) if x.stage == "decode" and x is not lease]
        context = sum(x.tokens for x in there) + lease.tokens
        refusal = admission.at_decode(plan, self._request, self._sets.step_s(plan.decode, len(there) + 1, context))
        if refusal is not None:
            self._booked.finished(now)
        return refusal

    def finished(self, now: float) -> None:
        if self._residence is not None:
            self._residence.ended(now - self._booked.lease.decoding)
        self._booked.finished(now)

    def failed(self, now: float) -> None:
        self._booked.failed(now)


class LiveBrain:
    def __init__(self, setup: Setup, scheduler: Scheduler, residence: admission.Residence | None) -> None:
        """`residence`: learns how long requests decode, where admission is on; decode instances then look again."""
        self._setup, self._scheduler, self._cluster = setup, scheduler, scheduler.cluster
        self._sets, self._residence = DecodeSets(scheduler.cluster), residence
        self.replication: Replication | None = None
        """The rule for hot prefixes, where there is to be one."""
        for instance in (*setup.prefill_ids, *setup.decode_ids):
            self.joined(instance, 0.0)

    def decide(self, request: Request, now: float) -> LiveBooking | Refusal:
        answer = self._scheduler.decide(request, now)
        if self.replication is not None and isinstance(answer, Booked):
            self.replication.seen(request.chain, answer.plan.cached_tokens // BLOCK, BLOCK, now)
        return answer if isinstance(answer, Refusal) else LiveBooking(answer, request, self._sets, self._residence)

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
        if self.replication is None:
            return ()
        wanted = self.replication.copies(self._cluster.view(now))
        return [Copy(t.source, t.target, tuple(c.key(i) for i in range(t.first, t.last))) for c, t in wanted]


def run(case: Case, trace: Trace, progress: Callable[[int], None] = lambda done: None) -> Run:
    """Play a trace with a case's policy. The same case and trace give the same numbers."""
    random = Random(case.seed)
    cluster = Cluster(PrefixIndex(random), Ledger(random), random)
    residence = admission.Residence() if case.admission != "off" else None
    gate = admission.named("hard", case.admission, DecodeSets(cluster), residence) if residence else admission.Off()
    scheduler = Scheduler(cluster, policies.named(case.policy, random), gate, remember=1)
    brain = LiveBrain(case.setup, scheduler, residence)
    brain.replication = Replication() if case.replicate else None
    finished = Engine(case.setup, brain, named(case.cache)).run(trace, progress)
    cluster.ledger.check()
    if len(cluster.ledger):
        raise AssertionError(f"{len(cluster.ledger)} leases outlived their requests")
    return finished
