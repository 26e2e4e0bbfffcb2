"""When a converted prefix pays: what it costs to compute, to convert and to fetch a token's KV. Pure arithmetic, no I/O.

    (a) convert on load    read the source's page, convert it     fetch(source) + convert
    (b) converted ahead    read the target's page                 fetch(target)
        neither            compute it                             prefill

    serve converted  iff  min(a, b) + overhead < ALPHA · prefill  and  tokens >= min_tokens

Units: FLOP, bytes, seconds; two FLOP make one multiply-add. Only matrix products count (c2c-design §7).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from moonpool.c2c.signature import ModelSpec
from moonpool.errors import ModelError

ALPHA = 0.7
"""A converted prefix is an approximation, so it must save at least 30 % of the time to be worth taking."""

Reason = Literal["pays", "too_short", "too_slow"]
Weights: TypeAlias = Callable[[ModelSpec, ModelSpec], int | None]
"""(source, target) → weights of a map, all target layers together; None where it does not fit the pair."""

_C2C_WIDTH = 1024
_C2C_INNER_LAYERS = 6


# -- work


def layer_parameters(spec: ModelSpec) -> int:
    """Weights that one token meets in one layer: the four attention projections and a gated feed-forward layer (three
    matrices). Raises ModelError where `config.json` did not give the feed-forward width."""
    if not spec.intermediate:
        raise ModelError("config.json lacks intermediate_size", key=spec.name, fix="Its cost cannot be told without.")
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return spec.hidden * (2 * queries + 2 * keys + 3 * spec.intermediate)


def parameters(spec: ModelSpec) -> int:
    """Weights that prefill multiplies a token with: all but embeddings and LM head (which only the last token needs)."""
    return spec.num_layers * layer_parameters(spec)


def span_flops(spec: ModelSpec, start: int, end: int) -> float:
    """FLOP to prefill tokens `[start, end)` behind `start` tokens whose KV is there."""
    attention = 2 * spec.num_heads * spec.head_dim * spec.num_layers * (end * end - start * start)
    return float(2 * parameters(spec) * (end - start) + attention)


def prefill_flops(spec: ModelSpec, context: int) -> float:
    """FLOP per token to prefill `context` tokens: 2 · parameters + 2 · query width · context · layers (causal average)."""
    return span_flops(spec, 0, context) / context


def kv_bytes(spec: ModelSpec) -> int:
    """Bytes of one token's KV as the pool holds it (bf16)."""
    return spec.page_shape(1).nbytes


# -- maps (c2c-design §2)


def full_head(source: ModelSpec, target: ModelSpec, *, layers: int, rank: int = 0) -> int:
    """F-k: each target layer reads `layers` source layers whole, K from K and V from V; with `rank`, a bottleneck beside it."""
    rows, width = layers * _width(source), _width(target)
    return 2 * target.num_layers * (rows * width + rank * (rows + width))


def head_local(source: ModelSpec, target: ModelSpec, *, layers: int) -> int | None:
    """HL-k: target head h from source head h of `layers` source layers; only where heads and head_dim are equal."""
    if (source.num_kv_heads, source.head_dim) != (target.num_kv_heads, target.head_dim):
        return None
    return 2 * target.num_layers * layers * target.num_kv_heads * target.head_dim**2


def c2c_shape(source: ModelSpec, target: ModelSpec) -> int:
    """The published fuser's shape, reading the source only: in, six 1024² layers, out, one weight per head, for K and V."""
    inner = _C2C_INNER_LAYERS * _C2C_WIDTH + _width(source) + _width(target) + target.num_kv_heads
    return 2 * target.num_layers * _C2C_WIDTH * inner


def _width(spec: ModelSpec) -> int:
    return spec.num_kv_heads * spec.head_dim


VARIANTS: dict[str, Weights] = {
    "C2C-shape": c2c_shape,
    "F-1": partial(full_head, layers=1),
    "F-4": partial(full_head, layers=4),
    "F-8": partial(full_head, layers=8),
    "F-4+R256": partial(full_head, layers=4, rank=256),
    "HL-4": partial(head_local, layers=4),
}
DEFAULT_VARIANT = "F-4"


def conversion_flops(variant: str, source: ModelSpec, target: ModelSpec) -> int | None:
    """FLOP per token of a map; None where it does not fit the pair. Raises KeyError for a variant that is not in VARIANTS."""
    weights = VARIANTS[variant](source, target)
    return None if weights is None else 2 * weights


def cheapest_variant(source: ModelSpec, target: ModelSpec) -> str:
    """What a fit would be tried with first: HL-4 where the heads match, else F-1."""
    return "HL-4" if head_local(source, target, layers=4) is not None else "F-1"


# -- time


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates that a target's machine reaches."""

    prefill: float
    """FLOP/s of the target's prefill."""
    convert: float
    """FLOP/s of a conversion."""
    fetch: float
    """Bytes/s from the pool into the target's cache."""
    overhead_s: float = 0.002
    """Per request that takes converted pages: lookup, calls, queueing."""
    min_tokens: int = 512
    """No fewer tokens are taken converted, however fast."""


_COMPUTE = {"big-gpu": 400e12, "small-gpu": 50e12, "cpu-amx": 10e12, "cpu": 1e12}
"""Effective FLOP/s; `cpu` is a dozen server cores without matrix units."""
NETWORKS = {"100gbe": 11e9, "pcie4": 22e9, "400g": 45e9}
"""Effective bytes/s; `400g` stands for PCIe 5 too."""
HARDWARE = tuple(_COMPUTE)


def profile(hardware: str, network: str) -> Machine:
    """A machine to plan with, conversion running where prefill does. Raises KeyError for unknown names."""
    rate = _COMPUTE[hardware]
    return Machine(
        prefill=rate,
        convert=rate,
        fetch=NETWORKS[network],
        min_tokens=64 if hardware.startswith("cpu") else 512,
    )


@dataclass(frozen=True, slots=True)
class Decision:
    reason: Reason
    serve_s: float
    """Time to have the tokens by conversion, overhead included."""
    prefill_s: float

    @property
    def pays(self) -> bool:
        return self.reason == "pays"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCost:
    """One source, one target, one map, on one machine; seconds per token but for `overhead_s`."""

    target: ModelSpec
    prefill_rate: float
    """FLOP/s."""
    convert_s: float
    fetch_source_s: float
    fetch_target_s: float
    overhead_s: float
    min_tokens: int

    @property
    def on_load_s(self) -> float:
        """(a), one token."""
        return self.fetch_source_s + self.convert_s

    @property
    def ahead_s(self) -> float:
        """(b), one token."""
        return self.fetch_target_s

    def prefill_s(self, start: int, end: int) -> float:
        """Time to compute tokens `[start, end)` natively."""
        return span_flops(self.target, start, end) / self.prefill_rate

    def judge(self, start: int, end: int, load_s: float) -> Decision:
        """Whether to take tokens `[start, end)` at the price of `load_s` seconds, or to compute them."""
        serve, prefill = load_s + self.overhead_s, self.prefill_s(start, end)
        reason: Reason = "pays"
        if load_s >= ALPHA * prefill:
            reason = "too_slow"
        elif end - start < self.min_tokens or serve >= ALPHA * prefill:
            reason = "too_short"
        return Decision(reason, serve, prefill)

    def least_tokens(self, per_token_s: float, context: int) -> float:
        """L_min: tokens from which the saving covers the overhead, at the given cost of a token; inf if there is no saving."""
        saving = self.prefill_s(0, context) / context - per_token_s
        return self.overhead_s / saving if saving > 0 else math.inf

    def page_refusal(self, start: int, end: int) -> str:
        """Why a page of tokens `[start, end)` should not be converted ahead; empty if it can pay.

        How long the prefix of a request will be is not known then, and a page of a short prefix is wanted for a longer one
        too, so only rates count: the page must be read sooner than computed, and made sooner than computed, or one use of it
        costs more than it saves.
        """
        prefill = self.prefill_s(start, end)
        if self.ahead_s * (end - start) >= ALPHA * prefill:
            return "fetch_slower_than_prefill"
        return "convert_slower_than_prefill" if self.on_load_s * (end - start) >= prefill else ""


def pair_cost(machine: Machine, source: ModelSpec, target: ModelSpec, conversion: float) -> PairCost:
    """Costs on `machine` of a map that takes `conversion` FLOP per token (a projector's `flops_per_token`)."""
    return PairCost(
        target=target,
        prefill_rate=machine.prefill,
        convert_s=conversion / machine.convert,
        fetch_source_s=kv_bytes(source) / machine.fetch,
        fetch_target_s=kv_bytes(target) / machine.fetch,
        overhead_s=machine.overhead_s,
        min_tokens=machine.min_tokens,
    )


def decide(cost: PairCost, start: int, end: int, *, ahead: bool = True, on_load: bool = True) -> Decision:
    """The rule for tokens `[start, end)`, by the faster of the ways that are open (at least one)."""
    ways = [s for s, is_open in ((cost.ahead_s, ahead), (cost.on_load_s, on_load)) if is_open]
    return cost.judge(start, end, min(ways) * (end - start))
