"""Copies of hot prefixes before their holders' links are full: a pure rule that is asked now and then.

A chain's end is hot while its request rate, times what its blocks save each, exceeds what a copy costs. It is copied to the least
loaded instance that has not got it, when its holders queue longer than the fleet does. Forwarding alone (Algorithm 1) makes fewer
copies than the paper's Fig. 11 shows.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from moonpool.conductor.types import Chain, ClusterView, InstanceId, Transfer


class ReplicationOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    half_life_s: float = 60.0
    """Of a chain's heat."""
    cool_down_s: float = 10.0
    """Between two copies of one chain."""
    replicas: int = 8
    """At most."""
    link_share: float = 0.2
    """Of a sender's time that copies may take."""
    chains: int = 4096
    """That are watched; the coldest are forgotten."""


@dataclass(slots=True)
class _Heat:
    chain: Chain
    blocks: int
    tokens: int
    rate: float
    """Requests/s, decaying."""
    at: float
    copied: float = -math.inf


class Replication:
    def __init__(self, options: ReplicationOptions = ReplicationOptions()) -> None:
        self._o = options
        self._heat: OrderedDict[int, _Heat] = OrderedDict()
        self._sent: dict[InstanceId, float] = {}
        """Until when a sender's share is used up."""

    def seen(self, chain: Chain, blocks: int, block_size: int, now: float) -> None:
        """A request hit `blocks` of a chain."""
        if not blocks:
            return
        key, o = chain.key(blocks - 1), self._o
        heat = self._heat.get(key)
        if heat is None:
            heat = self._heat[key] = _Heat(chain, blocks, blocks * block_size, 0.0, now)
        heat.rate = self._rate(heat, now) + math.log(2) / o.half_life_s
        heat.at = now
        self._heat.move_to_end(key)
        while len(self._heat) > o.chains:
            self._heat.popitem(last=False)

    def _rate(self, heat: _Heat, now: float) -> float:
        return float(heat.rate * 0.5 ** ((now - heat.at) / self._o.half_life_s))

    def copies(self, view: ClusterView) -> list[tuple[Chain, Transfer]]:
        """What is worth sending now, each with the chain that its blocks are of. Who asks, sends."""
        found: list[tuple[Chain, Transfer]] = []
        fleet = view.instances("prefill")
        if len(fleet) < 2:
            return found
        mean = sum(map(view.queue_s, fleet)) / len(fleet)
        for heat in sorted(self._heat.values(), key=lambda h: -self._rate(h, view.now)):
            if view.now < heat.copied + self._o.cool_down_s:
                continue
            copy = self._copy(heat, view, mean)
            if copy is not None:
                found.append((heat.chain, copy))
                heat.copied = view.now
        return found

    def _copy(self, heat: _Heat, view: ClusterView, mean: float) -> Transfer | None:
        held = {i: d for i, d in view.matches(heat.chain).items() if d.sure >= heat.blocks}
        if not held or len(held) >= self._o.replicas:
            return None
        sender = min(held, key=lambda i: view.transfer_s(i, i, heat.tokens))
        target = next((i for i in view.least_loaded("prefill", len(held) + 1) if i not in held), None)
        if target is None or view.queue_s(sender) <= mean or self._sent.get(sender, -math.inf) > view.now:
            return None
        cost = view.transfer_s(sender, target, heat.tokens)
        saved = view.prefill_s(target, heat.tokens, 0)
        if self._rate(heat, view.now) * self._o.half_life_s * saved <= cost:
            return None
        self._sent[sender] = view.now + cost / self._o.link_share
        return Transfer(sender, target, 0, heat.blocks)
