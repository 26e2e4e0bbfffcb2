"""One model's instances with all that is known of them, and the view of it that policies get."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from moonpool.conductor.index import PrefixIndex
from moonpool.conductor.ledger import Lease, Ledger
from moonpool.conductor.perf import Correction, PerfModel
from moonpool.conductor.types import Chain, Depth, InstanceId, Random, Request, Role


@dataclass(slots=True)
class Member:
    """An instance as the scheduler sees it."""

    id: InstanceId
    prefill: bool
    decode: bool
    perf: PerfModel
    joined: float = 0.0
    capacity_tokens: int = 0
    """KV that its decode batch may hold; 0 = no limit known."""
    open: bool = True
    """Takes requests: ready, not draining, its breaker closed. Set by who watches its health."""
    penalty_s: float = 0.0
    guesses: bool = True
    """No events come from it: what is sent there is taken for what it holds."""
    correction: Correction = field(default_factory=Correction)


class Cluster:
    """Mutable state of one model's fleet. Its owner is one event loop."""

    def __init__(self, index: PrefixIndex, ledger: Ledger, random: Random, *, fresh_s: float = 60.0) -> None:
        """`fresh_s`: how long an instance counts as new."""
        self.index, self.ledger, self.random, self.fresh_s = index, ledger, random, fresh_s
        self.members: dict[InstanceId, Member] = {}

    def join(self, member: Member, now: float, *, closed: bool = True, cache_blocks: int = 0) -> None:
        member.joined = now
        self.members[member.id] = member
        self.index.register(member.id, closed=closed, guess_blocks=cache_blocks)
        self.ledger.join(member.id, prefill=member.prefill, decode=member.decode, now=now)

    def leave(self, instance: InstanceId) -> None:
        """Out of candidates and index at once."""
        self.members.pop(instance, None)
        self.index.unregister(instance)
        self.ledger.leave(instance)

    def view(self, now: float) -> View:
        return View(self, now)

    # -- what admission asks (`admission.DecodeSets`)

    def decoding(self, instance: InstanceId) -> Sequence[Lease]:
        return self.ledger.decoding(instance)

    def step_s(self, instance: InstanceId, batch: int, context: int) -> float:
        return self.members[instance].perf.step_s(batch, context)


class View:
    """`types.ClusterView` of a cluster at one moment."""

    def __init__(self, cluster: Cluster, now: float) -> None:
        self._c, self.now = cluster, now

    def instances(self, role: Role) -> Sequence[InstanceId]:
        return [m.id for m in self._c.members.values() if m.open and (m.prefill if role == "prefill" else m.decode)]

    def least_loaded(self, role: Role, count: int) -> Sequence[InstanceId]:
        ledger, members = self._c.ledger, self._c.members
        want = min(len(members), count)
        while True:
            found = ledger.least_prefill(want, self.now) if role == "prefill" else ledger.least_decode(want)
            taken = [i for i in found if i in members and members[i].open]
            if len(taken) >= count or want >= len(members):
                return taken[:count]
            want = min(len(members), 2 * want)

    def matches(self, chain: Chain) -> Mapping[InstanceId, Depth]:
        members = self._c.members
        found = self._c.index.matches(chain)
        return {i: d for i, d in found.items() if (m := members.get(i)) is not None and m.open and m.prefill}

    def shared_depth(self, chain: Chain) -> int:
        return self._c.index.shared_depth(chain, len(self._c.members))

    def requests(self, instance: InstanceId, role: Role) -> int:
        return self._c.ledger.queued(instance) if role == "prefill" else self._c.ledger.batch(instance)

    def kind(self, instance: InstanceId) -> Hashable:
        m = self._c.members[instance]
        return id(m.perf), m.correction.factor

    def queue_s(self, instance: InstanceId) -> float:
        return self._c.ledger.queue_s(instance, self.now)

    def prefill_s(self, instance: InstanceId, tokens: int, cached: int) -> float:
        m = self._c.members[instance]
        return m.perf.prefill_s(tokens, cached) * m.correction.factor

    def transfer_s(self, source: InstanceId, target: InstanceId, tokens: int) -> float:
        model = self._c.members[source].perf
        return self._c.ledger.nic_free_s(source, self.now) + model.transfer_s(tokens)

    def tbt_s(self, instance: InstanceId, request: Request) -> float:
        ledger = self._c.ledger
        context = ledger.context(instance) + request.tokens + request.output_tokens
        return self._c.members[instance].perf.step_s(ledger.batch(instance) + 1, context)

    def kv_room(self, instance: InstanceId) -> int:
        limit = self._c.members[instance].capacity_tokens
        return limit - self._c.ledger.context(instance) if limit else 1 << 62

    def penalty_s(self, instance: InstanceId) -> float:
        return self._c.members[instance].penalty_s

    def fresh(self, instance: InstanceId) -> bool:
        return self.now < self._c.members[instance].joined + self._c.fresh_s
