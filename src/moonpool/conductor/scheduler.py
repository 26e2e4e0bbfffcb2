"""Choose, admit and book in one step: between the choice and the booking nobody else gets a word in, so a burst does not herd.

A decision costs the index an entry at once (the blocks will be there when the prefill is over), long before any event says so.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import msgspec

from moonpool.conductor.cluster import Cluster
from moonpool.conductor.index import Plane
from moonpool.conductor.ledger import Lease
from moonpool.conductor.types import ClusterView, Plan, Policy, Refusal, Request

_MARGIN_S = 2.0
"""Beyond the predicted end of a prefill that its blocks count as held without an event."""


class Admission(Protocol):
    def admit(self, plan: Plan, request: Request, view: ClusterView) -> Plan | Refusal:
        """The plan, as it is or marked, or why it is not served now."""
        ...


class Open:
    """Admits everything."""

    def admit(self, plan: Plan, request: Request, view: ClusterView) -> Plan | Refusal:
        return plan


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """For the log: what was decided, with all terms."""

    id: str
    at: float
    model: str
    tokens: int
    plan: Plan | None = None
    refusal: Refusal | None = None


class Booked:
    """A decision that is paid for. Each step may come twice or not at all; `finished` or `failed` must come."""

    def __init__(self, scheduler: Scheduler, request: Request, plan: Plan, lease: Lease) -> None:
        self._scheduler, self._request, self.plan, self.lease = scheduler, request, plan, lease
        self._started: float | None = None

    def started(self, now: float) -> None:
        """Its prefill runs (where an engine tells)."""
        self._started = now
        self._scheduler.cluster.ledger.started(self.lease, now)

    def first_token(self, now: float) -> None:
        if self.lease.stage in ("queued", "prefill"):
            self._scheduler.prefilled(self, self._request, self._started, now)
        self._scheduler.cluster.ledger.prefilled(self.lease, now)

    def finished(self, now: float) -> None:
        self._scheduler.cluster.ledger.release(self.lease, now)

    def failed(self, now: float) -> None:
        """Its instance broke, or its client left: what we took for held may not be."""
        if self.lease.stage in ("queued", "prefill"):
            self._scheduler.unlearn(self, self._request)
        self._scheduler.cluster.ledger.release(self.lease, now)


class Scheduler:
    def __init__(
        self, cluster: Cluster, policy: Policy, admission: Admission | None = None, *, remember: int = 1000
    ) -> None:
        """`remember`: decisions that `log` keeps."""
        self.cluster, self.policy, self.admission = cluster, policy, admission or Open()
        self.log = deque[Decision](maxlen=remember)

    def decide(self, request: Request, now: float) -> Booked | Refusal:
        self.cluster.index.expire(now)
        view = self.cluster.view(now)
        plan = self.policy.plan(request, view)
        if isinstance(plan, Plan):
            plan = self.admission.admit(plan, request, view)
        if isinstance(plan, Refusal):
            self._note(request, now, refusal=plan)
            return plan
        booked = Booked(self, request, plan, self._book(request, plan, now))
        self._note(request, now, plan=plan)
        return booked

    def _book(self, request: Request, plan: Plan, now: float) -> Lease:
        p, ledger = plan.predicted, self.cluster.ledger
        work = p.prefill_s + p.transfer_s + p.convert_s
        answer = p.tbt_s * request.output_tokens
        lease = ledger.book(plan.prefill, plan.decode, work, request.tokens + request.output_tokens, now, answer)
        for t in plan.transfers:
            model = self.cluster.members[t.source].perf
            ledger.send(t.source, model.transfer_s((t.last - t.first) * request.block_size), now)
        self._guess(request, plan, now, p.ttft_s + _MARGIN_S)
        return lease

    def _guess(self, request: Request, plan: Plan, now: float, for_s: float, plane: Plane = Plane.GUESS) -> None:
        """Of a prompt that waits, only what the instance has not got anyway; of one that is done, all: its blocks were just used."""
        held = plan.own_tokens // request.block_size if plane is Plane.GUESS else 0
        if held < len(request.chain) and plan.prefill in self.cluster.members:
            self.cluster.index.guess(plan.prefill, request.chain.keys()[held:], now, for_s, plane)

    def prefilled(self, booked: Booked, request: Request, started: float | None, now: float) -> None:
        """A prefill ended: a sample for its instance, and where no events come, its blocks stand for longer."""
        plan, member = booked.plan, self.cluster.members.get(booked.plan.prefill)
        if member is None:
            return
        predicted = member.perf.prefill_s(request.tokens, plan.cached_tokens)
        if started is not None:
            member.correction.add(request.tokens - plan.cached_tokens, predicted, now - started)
        if member.guesses:
            self._guess(request, plan, now, 0.0, Plane.SENT)

    def unlearn(self, booked: Booked, request: Request) -> None:
        """Blocks that were to be there will not."""
        instance = booked.plan.prefill
        if instance in self.cluster.members:
            held = booked.plan.own_tokens // request.block_size
            self.cluster.index.forget(instance, request.chain.keys()[held:])

    def _note(self, request: Request, now: float, plan: Plan | None = None, refusal: Refusal | None = None) -> None:
        self.log.append(
            Decision(id=request.id, at=now, model=request.model, tokens=request.tokens, plan=plan, refusal=refusal)
        )
