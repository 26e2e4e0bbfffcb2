"""What policies share: the decode instance, the terms of an estimate, and the plan made of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.conductor.types import ClusterView, InstanceId, Plan, Predicted, Random, Refusal, Request, Transfer

NOBODY = Refusal(stage="pool", why="no instance takes requests for this model", retry_after_s=1.0)


@dataclass(frozen=True, slots=True)
class Choice:
    """A prefill instance and what would happen there."""

    prefill: InstanceId
    own: int = 0
    """Tokens of the prompt that it holds."""
    cached: int = 0
    """Tokens that need no computing there: its own, and what is moved or converted."""
    converted: int = 0
    queue_s: float = 0.0
    transfer_s: float = 0.0
    convert_s: float = 0.0
    prefill_s: float = 0.0
    transfers: tuple[Transfer, ...] = ()
    why: str = ""

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.transfer_s + self.convert_s + self.prefill_s


def held_tokens(request: Request, blocks: int) -> int:
    """Of the prompt; at least its last token is always computed, for it gives the first answer token."""
    return min(blocks * request.block_size, request.tokens - 1)


def local(request: Request, view: ClusterView, instance: InstanceId, blocks: int, why: str = "") -> Choice:
    """It uses what it has and computes the rest."""
    own = held_tokens(request, blocks)
    return Choice(
        instance,
        own=own,
        cached=own,
        queue_s=view.queue_s(instance),
        prefill_s=view.prefill_s(instance, request.tokens, own),
        why=why,
    )


def decode_for(
    request: Request, view: ClusterView, random: Random, prefill: InstanceId
) -> tuple[InstanceId, float] | None:
    """Of those with room for prompt and answer: least predicted time between tokens; equal ones by room, then by chance. Few are
    looked at: the least loaded. The prefill instance itself, where it decodes too, wins among equals: nothing moves."""
    need = request.tokens + request.output_tokens
    near = view.least_loaded("decode", 8)
    found = [i for i in near if view.kv_room(i) >= need] or [
        i for i in view.instances("decode") if view.kv_room(i) >= need
    ]
    if not found:
        found = list(near)  # nobody has room: the engine will queue it
    if not found:
        return None
    ranked = [(view.tbt_s(i, request), i != prefill, -view.kv_room(i), random.random(), i) for i in found]
    best = min(ranked)
    return best[-1], best[0]


def planned(
    policy: str, request: Request, view: ClusterView, random: Random, choice: Choice, considered: int
) -> Plan | Refusal:
    decode = decode_for(request, view, random, choice.prefill)
    if decode is None:
        return NOBODY
    return Plan(
        prefill=choice.prefill,
        decode=decode[0],
        cached_tokens=choice.cached,
        own_tokens=choice.own,
        converted_tokens=choice.converted,
        transfers=choice.transfers,
        predicted=Predicted(
            queue_s=choice.queue_s,
            transfer_s=choice.transfer_s,
            convert_s=choice.convert_s,
            prefill_s=choice.prefill_s,
            tbt_s=decode[1],
        ),
        policy=policy,
        why=choice.why,
        considered=considered,
    )


def pick(random: Random, names: Sequence[InstanceId]) -> InstanceId:
    return names[random.randrange(len(names))]
