"""Who owes which work: leases, and sums that follow from them. Pure; time is an argument.

There are no bare counters. Whoever books gets a `Lease`; every way in which a request can end releases it, any number of times, and
`sweep` releases what somebody forgot. A sum is kept beside the leases only where asking for it must be cheap, returns to exactly 0
with the last lease, and `check` reckons it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moonpool.conductor.ranking import Ranking
from moonpool.conductor.types import InstanceId, Random

Stage = Literal["queued", "prefill", "decode", "ended"]


@dataclass(slots=True)
class Lease:
    """One request's claim on a prefill and a decode instance."""

    id: int
    prefill: InstanceId
    decode: InstanceId
    prefill_s: float
    """Predicted."""
    tokens: int
    """Of prompt and answer: what the decode instance must hold."""
    booked: float
    deadline: float
    due: float = 0.0
    """When its first token is expected."""
    stage: Stage = "queued"
    started: float = 0.0
    decoding: float = 0.0


@dataclass(slots=True)
class _Prefill:
    leases: dict[int, Lease] = field(default_factory=dict)
    """In the order that they were booked: engines work first come, first served."""
    work_s: float = 0.0
    """Predicted seconds of all that have not ended."""

    def queue_s(self, now: float) -> float:
        """Work before a new request: all of it, less what the running one has had."""
        if not self.leases:
            return 0.0
        first = next(iter(self.leases.values()))
        had = min(first.prefill_s, max(0.0, now - first.started)) if first.stage == "prefill" else 0.0
        return max(0.0, self.work_s - had)


@dataclass(slots=True)
class _Decode:
    leases: dict[int, Lease] = field(default_factory=dict)
    tokens: int = 0
    """Reserved: also for those whose prefill has not ended."""


class Ledger:
    def __init__(self, random: Random, *, overdue: float = 3.0, least_s: float = 60.0) -> None:
        """A lease is overdue after `overdue` × its predicted time, `least_s` at least."""
        self._overdue, self._least = overdue, least_s
        self._next = 0
        self._leases: dict[int, Lease] = {}
        self._prefill: dict[InstanceId, _Prefill] = {}
        self._decode: dict[InstanceId, _Decode] = {}
        self._by_work, self._by_tokens = Ranking(random), Ranking(random)
        self._nic: dict[InstanceId, float] = {}
        self.swept = 0

    def __len__(self) -> int:
        return len(self._leases)

    # -- instances

    def join(self, instance: InstanceId, *, prefill: bool, decode: bool, now: float) -> None:
        if prefill and instance not in self._prefill:
            self._prefill[instance] = _Prefill()
            self._rank_prefill(instance, now)
        if decode and instance not in self._decode:
            self._decode[instance] = _Decode()
            self._rank_decode(instance)

    def leave(self, instance: InstanceId) -> None:
        """It is gone. Its leases stay until their requests end, which releases the other instance's share."""
        self._prefill.pop(instance, None)
        self._decode.pop(instance, None)
        self._nic.pop(instance, None)
        self._by_work.drop(instance)
        self._by_tokens.drop(instance)

    # -- leases

    def book(
        self, prefill: InstanceId, decode: InstanceId, prefill_s: float, tokens: int, now: float, decode_s: float = 0.0
    ) -> Lease:
        """`decode_s`: predicted time of the answer, for the deadline alone."""
        self._next += 1
        queue = self.queue_s(prefill, now)
        deadline = now + max(self._least, self._overdue * (queue + prefill_s + decode_s))
        lease = Lease(self._next, prefill, decode, prefill_s, tokens, now, deadline, now + queue + prefill_s)
        self._leases[lease.id] = lease
        if (p := self._prefill.get(prefill)) is not None:
            p.leases[lease.id] = lease
            p.work_s += prefill_s
            self._rank_prefill(prefill, now)
        if (d := self._decode.get(decode)) is not None:
            d.leases[lease.id] = lease
            d.tokens += tokens
            self._rank_decode(decode)
        return lease

    def started(self, lease: Lease, now: float) -> None:
        """Its prefill runs."""
        if lease.stage == "queued":
            lease.stage, lease.started = "prefill", now

    def prefilled(self, lease: Lease, now: float) -> None:
        """Its first token is there: the prefill instance is done with it."""
        if lease.stage in ("queued", "prefill"):
            lease.stage, lease.decoding = "decode", now
            self._leave_prefill(lease, now)

    def release(self, lease: Lease, now: float) -> None:
        """It has ended, in whatever way. Twice is as good as once."""
        if self._leases.pop(lease.id, None) is None:
            return
        self._leave_prefill(lease, now)
        lease.stage = "ended"
        d = self._decode.get(lease.decode)
        if d is not None and d.leases.pop(lease.id, None) is not None:
            d.tokens = d.tokens - lease.tokens if d.leases else 0
            self._rank_decode(lease.decode)

    def _leave_prefill(self, lease: Lease, now: float) -> None:
        p = self._prefill.get(lease.prefill)
        if p is not None and p.leases.pop(lease.id, None) is not None:
            p.work_s = p.work_s - lease.prefill_s if p.leases else 0.0
            self._rank_prefill(lease.prefill, now)

    def sweep(self, now: float) -> list[Lease]:
        """Releases what is overdue, and gives it for the log."""
        late = [lease for lease in self._leases.values() if lease.deadline <= now]
        for lease in late:
            self.release(lease, now)
        self.swept += len(late)
        return late

    # -- transfers

    def nic_free_s(self, instance: InstanceId, now: float) -> float:
        """Until the sender's link is free."""
        return max(0.0, self._nic.get(instance, 0.0) - now)

    def send(self, instance: InstanceId, seconds: float, now: float) -> None:
        self._nic[instance] = max(now, self._nic.get(instance, 0.0)) + seconds

    # -- sums

    def queue_s(self, instance: InstanceId, now: float) -> float:
        p = self._prefill.get(instance)
        return p.queue_s(now) if p else 0.0

    def queued(self, instance: InstanceId) -> int:
        p = self._prefill.get(instance)
        return len(p.leases) if p else 0

    def batch(self, instance: InstanceId) -> int:
        """Requests that decode there, or will."""
        d = self._decode.get(instance)
        return len(d.leases) if d else 0

    def context(self, instance: InstanceId) -> int:
        """Tokens reserved there."""
        d = self._decode.get(instance)
        return d.tokens if d else 0

    def decoding(self, instance: InstanceId) -> list[Lease]:
        d = self._decode.get(instance)
        return list(d.leases.values()) if d else []

    def check(self) -> None:
        """Every sum again, from the leases. Raises AssertionError; for tests and the idle loop."""
        for name, p in self._prefill.items():
            mine = [x for x in self._leases.values() if x.prefill == name and x.id in p.leases]
            assert len(mine) == len(p.leases), name
            assert abs(p.work_s - sum(x.prefill_s for x in mine)) < 1e-6 * (1 + p.work_s), name
            assert mine or p.work_s == 0, name
        for name, d in self._decode.items():
            assert set(d.leases) <= set(self._leases), name
            assert d.tokens == sum(x.tokens for x in d.leases.values()), name

    # -- order

    def least_prefill(self, count: int, now: float) -> list[InstanceId]:
        """Those that will be free soonest."""
        return self._by_work.least(count, floor=now)

    def least_decode(self, count: int) -> list[InstanceId]:
        """Those with the fewest tokens reserved."""
        return self._by_tokens.least(count)

    def _rank_prefill(self, instance: InstanceId, now: float) -> None:
        self._by_work.put(instance, now + self._prefill[instance].queue_s(now))

    def _rank_decode(self, instance: InstanceId) -> None:
        self._by_tokens.put(instance, self._decode[instance].tokens)
