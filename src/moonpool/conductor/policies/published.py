"""Published cost functions of other routers, for comparison, in the terms that our view has.

Each takes the formula from its project's documentation; what a view cannot know is left out and said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moonpool.conductor.policies.base import NOBODY, held_tokens, local, pick, planned
from moonpool.conductor.types import ClusterView, Depth, InstanceId, Plan, Random, Refusal, Request


class _Scored:
    """The candidate with the least cost, ties at random."""

    name: str

    def __init__(self, random: Random) -> None:
        self.random = random

    def plan(self, request: Request, view: ClusterView) -> Plan | Refusal:
        found = view.instances("prefill")
        if not found:
            return NOBODY
        held = view.matches(request.chain)
        best = self.best(request, view, found, held)
        choice = local(request, view, best, held[best].blocks if best in held else 0, self.name)
        return planned(self.name, request, view, self.random, choice, len(found))

    def best(
        self, request: Request, view: ClusterView, found: Sequence[InstanceId], held: Mapping[InstanceId, Depth]
    ) -> InstanceId:
        return min(found, key=lambda i: (self.cost(request, view, i, held), self.random.random()))

    def cost(
        self, request: Request, view: ClusterView, instance: InstanceId, held: Mapping[InstanceId, Depth]
    ) -> float:
        """Load alone, where a policy's own rule is in `best`."""
        return view.queue_s(instance)


def _blocks(held: Mapping[InstanceId, Depth], instance: InstanceId) -> int:
    return held[instance].blocks if instance in held else 0


class Dynamo(_Scored):
    """NVIDIA Dynamo's KV router: `overlap_weight · prefill blocks to compute + decode blocks`, temperature 0. Queued prefill work is
    counted in blocks too; ours is in seconds, and is turned into the blocks that one block's seconds stand for."""

    name = "dynamo"

    def cost(
        self, request: Request, view: ClusterView, instance: InstanceId, held: Mapping[InstanceId, Depth]
    ) -> float:
        total = -(-request.tokens // request.block_size)
        one = view.prefill_s(instance, request.block_size, 0) or 1e-9
        return total - _blocks(held, instance) + view.queue_s(instance) / one + view.requests(instance, "decode")


class SGLangCacheAware(_Scored):
    """SGLang router's cache_aware: out of balance (max − min > 64 and max > 1.5 min requests) → shortest queue; else the best match,
    if it is over .3 of the prompt; else the smallest tree, which our view knows as the instance that holds least of this prompt
    and works least."""

    name = "sglang"

    def best(
        self, request: Request, view: ClusterView, found: Sequence[InstanceId], held: Mapping[InstanceId, Depth]
    ) -> InstanceId:
        load = {i: view.requests(i, "prefill") + view.requests(i, "decode") for i in found}
        least, most = min(load.values()), max(load.values())
        if most - least > 64 and most > 1.5 * least:
            return min(found, key=lambda i: (load[i], self.random.random()))
        deepest = max((_blocks(held, i) for i in found), default=0)
        if held_tokens(request, deepest) > 0.3 * request.tokens:
            return pick(self.random, [i for i in found if _blocks(held, i) == deepest])
        return min(found, key=lambda i: (_blocks(held, i), load[i], self.random.random()))


class Preble(_Scored):
    """Preble's E2 (ICLR'25): exploit if more of the prompt is cached than not, on the holder with the least load; else explore: the
    least of load + own prefill. Its eviction cost needs the caches' contents by age, which no view has: left out."""

    name = "preble"

    def best(
        self, request: Request, view: ClusterView, found: Sequence[InstanceId], held: Mapping[InstanceId, Depth]
    ) -> InstanceId:
        deepest = max((_blocks(held, i) for i in found), default=0)
        exploit = 2 * held_tokens(request, deepest) > request.tokens
        chosen = [i for i in found if _blocks(held, i) == deepest] if exploit else found
        return min(chosen, key=lambda i: (self._load(request, view, i, held), self.random.random()))

    @staticmethod
    def _load(request: Request, view: ClusterView, i: InstanceId, held: Mapping[InstanceId, Depth]) -> float:
        return view.queue_s(i) + view.prefill_s(i, request.tokens, held_tokens(request, _blocks(held, i)))


class LlmD(_Scored):
    """llm-d's weighted scorers in 0..1: prefix 2 × matched share, load 1 × (1 − requests / 128, half at most), 1 × free KV. The
    default weights differ by version; these are the guides'."""

    name = "llmd"

    def cost(
        self, request: Request, view: ClusterView, instance: InstanceId, held: Mapping[InstanceId, Depth]
    ) -> float:
        prefix = _blocks(held, instance) * request.block_size / max(1, request.tokens)
        waiting = view.requests(instance, "prefill")
        load = 0.5 * (1 - min(1.0, waiting / 128))
        room = min(1.0, view.kv_room(instance) / 1e6)
        return -(2 * min(1.0, prefix) + load + room)
