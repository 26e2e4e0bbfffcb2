"""KVCache-centric scheduling: Algorithm 1 of the Mooncake paper (FAST'25), with what experience asks of it.

For each candidate the time to the first token is predicted, by what it holds, by what could be sent to it, and by what could be
converted for it; the least wins:

    ttft = queue + min( prefill(own),  transfer(best − own) + prefill(best),  convert + prefill(converted) )

Beside the algorithm as printed:
* fetching is a choice by seconds and not by a ratio alone; the ratio θ keeps small gains from moving many bytes;
* the sender's queue is part of the transfer, and the second-best holder is asked where the best is busy;
* candidates are the deepest holders and the least loaded, not the whole fleet: microseconds at a thousand instances;
* what (nearly) all hold says nothing: without a floor, a system prompt that all requests share draws everything to one node;
* a failure not long ago counts as seconds; a fresh instance gets a small credit, and one request in a hundred explores: else what
  is cold stays cold;
* equal candidates are taken at random: the first of them would be everybody's first.
"""

from __future__ import annotations

from collections.abc import Mapping

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


class KVCacheOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    threshold: float = 2.0
    """θ: a holder must have this many times what the candidate has before blocks are moved to it."""
    transfers: bool = True
    """False: `local`, the cache-aware policy without transfers."""
    holders: int = 16
    """Deepest holders among the candidates."""
    idle: int = 16
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
        candidates = dict.fromkeys([*deep, *near])
        shared = self._shared(request, view, held)
        choices = [self._at(i, request, view, held, deep, shared) for i in candidates]
        best = min(choices, key=lambda c: (self._score(c, request, view), self.random.random()))
        return planned(self.name, request, view, self.random, best, len(choices))

    def _shared(self, request: Request, view: ClusterView, held: Mapping[InstanceId, Depth]) -> int:
        return view.shared_depth(request.chain) if len(held) > 1 else 0

    def _score(self, choice: Choice, request: Request, view: ClusterView) -> float:
        credit = self.options.fresh_credit * choice.prefill_s if view.fresh(choice.prefill) else 0.0
        if choice.prefill in request.pinned:
            credit += self.options.pinned_credit_s
        return choice.ttft_s + view.penalty_s(choice.prefill) - credit

    def _at(
        self,
        instance: InstanceId,
        request: Request,
        view: ClusterView,
        held: Mapping[InstanceId, Depth],
        deep: list[InstanceId],
        shared: int,
    ) -> Choice:
        """The best way to serve the request on this instance."""
        own = held[instance].blocks if instance in held else 0
        ways = [local(request, view, instance, own, "its own blocks" if own > shared else "computed")]
        if self.options.transfers:
            ways += self._fetched(instance, own, request, view, held, deep)
        ways += [w for c in request.convertible if (w := self._converted(instance, own, request, view, c)) is not None]
        return min(ways, key=lambda w: w.ttft_s)

    def _fetched(
        self,
        instance: InstanceId,
        own: int,
        request: Request,
        view: ClusterView,
        held: Mapping[InstanceId, Depth],
        deep: list[InstanceId],
    ) -> list[Choice]:
        """What the two deepest other holders could send."""
        found = []
        senders = [i for i in deep[:3] if i != instance and held[i].blocks > self.options.threshold * max(own, 1)]
        for sender in senders[:2]:
            most = held[sender].blocks
            cached = held_tokens(request, most)
            moved = cached - held_tokens(request, own)
            found.append(
                Choice(
                    instance,
                    own=held_tokens(request, own),
                    cached=cached,
                    queue_s=view.queue_s(instance),
                    transfer_s=view.transfer_s(sender, instance, moved),
                    prefill_s=view.prefill_s(instance, request.tokens, cached),
                    transfers=(Transfer(sender, instance, own, most),),
                    why=f"{most - own} blocks from {sender}",
                )
            )
        return found

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
