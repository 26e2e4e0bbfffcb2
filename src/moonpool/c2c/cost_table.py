"""What the cost model says about a pair, as rows to print or to encode (c2c-design §7). Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from moonpool.c2c.cost import (
    DEFAULT_VARIANT,
    VARIANTS,
    Machine,
    PairCost,
    cheapest_variant,
    conversion_flops,
    decide,
    kv_bytes,
    pair_cost,
    parameters,
    prefill_flops,
)
from moonpool.c2c.signature import ModelSpec

CONTEXTS = (1024, 4096, 32768)
LONG = CONTEXTS[-1]
BUNDLE = "bundle"


class WorkRow(msgspec.Struct, frozen=True):
    """One map: its FLOP per token, and their share of the target's prefill at each of CONTEXTS."""

    variant: str
    flops: float
    shares: tuple[float, ...]


class TimeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One machine and network at one context; microseconds per token."""

    hardware: str
    network: str
    variant: str
    """The map that `convert` and `on_load` are of."""
    prefill_us: float
    convert_us: float
    fetch_source_us: float
    fetch_target_us: float
    speedup_ahead: float
    """(b): prefill ÷ reading the target's pages."""
    speedup_on_load: float
    """(a): prefill ÷ (reading the source's pages + converting)."""
    least_tokens: int | None
    """L_min by the faster way, the machine's own floor included; None if no length pays."""
    verdict: str


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    target: str
    context: int
    source_kv_bytes: int
    target_kv_bytes: int
    target_parameters: int
    contexts: tuple[int, ...]
    prefill_flops: tuple[float, ...]
    """FLOP per token of the target's own prefill, at each of `contexts`."""
    work: list[WorkRow]
    times: list[TimeRow]
    notes: list[str]


Place = tuple[str, str, Machine, Mapping[str, float]]
"""(hardware, network, its rates, measured seconds per token of a variant where there are any)."""


def advise(
    source: ModelSpec,
    target: ModelSpec,
    places: Sequence[Place],
    *,
    context: int = 4096,
    bundle_flops: float | None = None,
) -> Advice:
    """The table of a pair. With `bundle_flops` (a projector's `flops_per_token`) that map stands beside the variants and
    the times are of it; else of the cheapest variant and of the default one. Raises ModelError for unknown costs."""
    prefill = tuple(prefill_flops(target, c) for c in CONTEXTS)
    flops: dict[str, float] = {v: f for v in VARIANTS if (f := conversion_flops(v, source, target)) is not None}
    timed = list(dict.fromkeys((cheapest_variant(source, target), DEFAULT_VARIANT)))
    if bundle_flops is not None:
        flops[BUNDLE], timed = bundle_flops, [BUNDLE]
    return Advice(
        source=source.name,
        target=target.name,
        context=context,
        source_kv_bytes=kv_bytes(source),
        target_kv_bytes=kv_bytes(target),
        target_parameters=parameters(target),
        contexts=CONTEXTS,
        prefill_flops=prefill,
        work=[WorkRow(v, f, tuple(f / p for p in prefill)) for v, f in flops.items()],
        times=[
            _times(source, target, place, variant, flops[variant], context) for place in places for variant in timed
        ],
        notes=_notes(source, target),
    )


def _times(source: ModelSpec, target: ModelSpec, place: Place, variant: str, flops: float, context: int) -> TimeRow:
    hardware, network, machine, measured = place
    cost = pair_cost(machine, source, target, flops)
    if variant in measured:
        cost = replace(cost, convert_s=measured[variant])
    prefill = cost.prefill_s(0, context) / context
    least = cost.least_tokens(min(cost.ahead_s, cost.on_load_s), context)
    return TimeRow(
        hardware=hardware,
        network=network,
        variant=variant,
        prefill_us=prefill * 1e6,
        convert_us=cost.convert_s * 1e6,
        fetch_source_us=cost.fetch_source_s * 1e6,
        fetch_target_us=cost.fetch_target_s * 1e6,
        speedup_ahead=prefill / cost.ahead_s,
        speedup_on_load=prefill / cost.on_load_s,
        least_tokens=None if math.isinf(least) else max(cost.min_tokens, math.ceil(least)),
        verdict=verdict(cost, context),
    )


def verdict(cost: PairCost, context: int) -> str:
    """Which ways pay at this context, or at which other one they would."""
    found = _ways(cost, context)
    if found:
        return found
    later = _ways(cost, LONG) if context < LONG <= cost.target.max_positions else ""
    return f"no ({LONG >> 10} K: {later})" if later else "no"


def _ways(cost: PairCost, context: int) -> str:
    ahead = decide(cost, 0, context, on_load=False).pays
    on_load = decide(cost, 0, context, ahead=False).pays
    return "yes" if ahead and on_load else "ahead only" if ahead else "on load only" if on_load else ""


def _notes(source: ModelSpec, target: ModelSpec) -> list[str]:
    found = ["Cost only: whether a map is good enough is what `moonpool c2c eval` and the gate say."]
    if source.tokenizer and target.tokenizer and source.tokenizer != target.tokenizer:
        found.append("The two tokenizers differ: no rule can be made for this pair, whatever it costs.")
    if "HL-4" not in {v for v in VARIANTS if conversion_flops(v, source, target) is not None}:
        found.append("HL-4 needs equal KV heads and head_dim; these differ.")
    return found
