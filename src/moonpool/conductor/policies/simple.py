"""Policies that do not look for caches: what a cache-aware one must beat. What the chosen instance happens to hold still counts."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import xxhash

from moonpool.conductor.policies.base import NOBODY, local, pick, planned
from moonpool.conductor.types import ClusterView, InstanceId, Plan, Random, Refusal, Request


class Blind(ABC):
    name: str

    def __init__(self, random: Random) -> None:
        self.random = random

    def plan(self, request: Request, view: ClusterView) -> Plan | Refusal:
        found = view.instances("prefill")
        if not found:
            return NOBODY
        chosen = self.choose(request, view, found)
        depth = view.matches(request.chain).get(chosen)
        choice = local(request, view, chosen, depth.blocks if depth else 0, self.name)
        return planned(self.name, request, view, self.random, choice, len(found))

    @abstractmethod
    def choose(self, request: Request, view: ClusterView, found: Sequence[InstanceId]) -> InstanceId: ...


class RandomPolicy(Blind):
    name = "random"

    def choose(self, request: Request, view: ClusterView, found: Sequence[InstanceId]) -> InstanceId:
        return pick(self.random, found)


class RoundRobin(Blind):
    name = "round_robin"

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._turn = itertools.count()

    def choose(self, request: Request, view: ClusterView, found: Sequence[InstanceId]) -> InstanceId:
        return sorted(found)[next(self._turn) % len(found)]


class LeastRequests(Blind):
    """Fewest requests queued or in prefill: "load balancing" of the paper's Fig. 5."""

    name = "least_requests"

    def choose(self, request: Request, view: ClusterView, found: Sequence[InstanceId]) -> InstanceId:
        return min(
            found, key=lambda i: (view.requests(i, "prefill") + view.requests(i, "decode"), self.random.random())
        )


class LeastWork(Blind):
    """Fewest predicted seconds of prefill."""

    name = "least_work"

    def choose(self, request: Request, view: ClusterView, found: Sequence[InstanceId]) -> InstanceId:
        return next(iter(view.least_loaded("prefill", 1)), found[0])


class PowerOfTwo(Blind):
    """The less loaded of two at random (Mitzenmacher, 2001), by our own ledger and not by a poll that is seconds old."""

    name = "power_of_two"

    def choose(self, request: Request, view: ClusterView, found: Sequence[InstanceId]) -> InstanceId:
        return min((pick(self.random, found) for _ in range(2)), key=view.queue_s)


class Session(Blind):
    """A session stays where it is: rendezvous hashing, with bounded load (an instance with more than `bound` × the mean number of
    requests is passed over). Requests without a session go by the chain's first block."""

    name = "session"

    def __init__(self, random: Random, bound: float = 1.25) -> None:
        super().__init__(random)
        self._bound = bound

    def choose(self, request: Request, view: ClusterView, found: Sequence[InstanceId]) -> InstanceId:
        key = request.session or (str(request.chain.key(0)) if len(request.chain) else request.id)
        load = {i: view.requests(i, "prefill") for i in found}
        most = self._bound * (sum(load.values()) + 1) / len(found)
        order = sorted(found, key=lambda i: xxhash.xxh3_64_intdigest(f"{key}\0{i}".encode()), reverse=True)
        return next((i for i in order if load[i] < most), order[0])
