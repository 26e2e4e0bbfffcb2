"""KVCache-centric scheduling: Algorithm 1 of the Mooncake paper (FAST'25), with what experience asks of it.

For each candidate the time to the first token is predicted, by what it holds, by what could be sent to it, and by what could be
converted for it; the least wins:

    ttft = queue + min( prefill(own),  transfer(best − own) + prefill(best),  convert + prefill(converted) )

Beside the algorithm as printed:
* fetching is a choice by seconds and not by a ratio alone; the ratio θ keeps small gains from moving many bytes;
* the sender's queue is part of the transfer, and the second-best holder is asked where the best is busy;
* candidates are the deepest holders and the least loaded, not the whole fleet: microseconds at a thousand instances;
* the queue is a term of the score: a longest match alone sends everybody who shares a system prompt to one node;
* a failure not long ago counts as seconds; a fresh instance gets a small credit, and one request in a hundred explores: else what
  is cold stays cold;
* equal candidates are taken at random: the first of them would be everybody's first.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import msgspec

from moonpool.conductor.policies.base import NOBODY, Choice, held_tokens, local, pick, planned
from moonpool.conductor.types import (
    ClusterView,
    Convertible,
    Depth,
    InstanceId,
    Plan,
    Random,
    Refusal,
    Request,
    Transfer,
)

_OWN = ""
"""The way that asks nobody."""
_Found = tuple[float, InstanceId, "InstanceId | Choice"]
"""Score, candidate, and whom it asks (or a ready choice)."""


class KVCacheOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    threshold: float = 2.0
    """θ: a holder must have this many times what the candidate has before blocks are moved to it."""
    transfers: bool = True
    """False: `local`, the cache-aware policy without transfers."""
    holders: int = 8
    """Deepest holders among the candidates."""
    idle: int = 8
    """Least loaded among the candidates."""
    explore: float = 0.01
    """Share of requests that go to a random one of the least loaded."""
    fresh_credit: float = 0.1
    """Share of its prefill that a fresh instance is forgiven."""
    pinned_credit_s: float = 0.001
    """What an instance with a pinned context is ahead of its equals."""


class KVCachePolicy:
    def __init__(self, random: Random, options: KVCacheOptions = KVCacheOptions()) -> None:
        self.random, self.options = random, options
        self.name = "kvcache" if options.transfers else "local"

    def plan(self, request: Request, view: ClusterView) -> Plan | Refusal:
        near = view.least_loaded("prefill", self.options.idle)
        if not near:
            return NOBODY
        held = view.matches(request.chain)
        if self.options.explore and self.random.random() < self.options.explore:
            one = pick(self.random, near)
            choice = local(request, view, one, held[one].blocks if one in held else 0, "explored")
            return planned(self.name, request, view, self.random, choice, 1)
        deep = sorted(held, key=lambda i: (-held[i].blocks, self.random.random()))[: self.options.holders]
        senders = sorted(deep, key=lambda i: -held[i].sure)[:3]
        known: dict[Hashable, tuple[float, float, InstanceId]] = {}
        found = [self._best_at(i, request, view, held, senders, known) for i in dict.fromkeys([*deep, *near])]
        best = min(found, key=lambda f: (f[0], self.random.random()))
        choice = self._choice(best, request, view, held)
        return planned(self.name, request, view, self.random, choice, len(found))

    def _best_at(
        self,
        instance: InstanceId,
        request: Request,
        view: ClusterView,
        held: Mapping[InstanceId, Depth],
        deepest: list[InstanceId],
        known: dict[Hashable, tuple[float, float, InstanceId]],
    ) -> _Found:
        """The best way to serve the request on this instance. Numbers only: this runs for every candidate of every request; `known`
        has what was reckoned for others of its kind that hold as much."""
        queue = view.queue_s(instance)
        own = held[instance].blocks if instance in held else 0
        alike = (view.kind(instance), own, instance in deepest)
        if alike not in known or instance in deepest:
            known[alike] = self._prefill(instance, own, request, view, held, deepest)
        alone, seconds, sender = known[alike]
        way: InstanceId | Choice = sender
        score = queue + seconds + view.penalty_s(instance)
        if view.fresh(instance):
            score -= self.options.fresh_credit * alone
        if instance in request.pinned:
            score -= self.options.pinned_credit_s
        for source in request.convertible:
            made = self._converted(instance, own, request, view, source)
            if made is not None and made.convert_s + made.prefill_s < seconds:
                score += made.convert_s + made.prefill_s - seconds
                seconds, way = made.convert_s + made.prefill_s, made
        return score, instance, way

    def _prefill(
        self,
        instance: InstanceId,
        own: int,
        request: Request,
        view: ClusterView,
        held: Mapping[InstanceId, Depth],
        deepest: list[InstanceId],
    ) -> tuple[float, float, InstanceId]:
        """Seconds from its own blocks alone, the best seconds, and whom that asks."""
        tokens, own_tokens = request.tokens, held_tokens(request, own)
        alone = seconds = view.prefill_s(instance, tokens, own_tokens)
        best = _OWN
        if self.options.transfers:
            least = self.options.threshold * max(own, 1)
            senders = [i for i in deepest if i != instance and held[i].sure > least]  # what still waits cannot be sent
            for sender in senders[:2]:
                cached = held_tokens(request, held[sender].sure)
                fetched = view.transfer_s(sender, instance, cached - own_tokens) + view.prefill_s(
                    instance, tokens, cached
                )
                if fetched < seconds:
                    seconds, best = fetched, sender
        return alone, seconds, best

    def _choice(self, found: _Found, request: Request, view: ClusterView, held: Mapping[InstanceId, Depth]) -> Choice:
        """The numbers of one candidate with all their terms."""
        _, instance, way = found
        if isinstance(way, Choice):
            return way
        own = held[instance].blocks if instance in held else 0
        if way == _OWN:
            return local(request, view, instance, own, "its own blocks" if own else "computed")
        most, own_tokens = held[way].sure, held_tokens(request, own)
        cached = held_tokens(request, most)
        return Choice(
            instance,
            own=own_tokens,
            cached=cached,
            queue_s=view.queue_s(instance),
            transfer_s=view.transfer_s(way, instance, cached - own_tokens),
            prefill_s=view.prefill_s(instance, request.tokens, cached),
            transfers=(Transfer(way, instance, own, most),),
            why=f"{most - own} blocks from {way}",
        )

    @staticmethod
    def _converted(
        instance: InstanceId, own: int, request: Request, view: ClusterView, source: Convertible
    ) -> Choice | None:
        """Pages of another model, made into this one's before the prefill."""
        held = view.matches(source.chain)
        most = max((d.blocks for d in held.values()), default=0)
        cached = min(held_tokens(request, most), int(source.max_share * request.tokens))
        have = held_tokens(request, own)
        if cached <= have:
            return None
        return Choice(
            instance,
            own=have,
            cached=cached,
            converted=cached - have,
            queue_s=view.queue_s(instance),
            convert_s=source.seconds_per_token * (cached - have),
            prefill_s=view.prefill_s(instance, request.tokens, cached),
            why=f"{cached - have} tokens converted from {source.model}",
        )
