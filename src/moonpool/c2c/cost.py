"""When a converted prefix pays: what it costs to compute, to convert and to fetch a token's KV. Pure arithmetic, no I/O.

    (a) convert on load    read the source's page, convert it     fetch(source) + convert
    (b) converted ahead    read the target's page                 fetch(target)
        neither            compute it                             prefill

Units: FLOP, bytes, seconds; two FLOP make one multiply-add. Only matrix products count (c2c-design §7).
"""

from __future__ import annotations

from moonpool.c2c.signature import ModelSpec
from moonpool.errors import ModelError


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
