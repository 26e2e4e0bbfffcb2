"""Configurations of the pair, and the initialisation both start from.

Recall from context needs an induction circuit: one head that looks one token back, and a later head that looks for
the place where the current token was seen before. Models this small find it late or never, so they START with a
rough one: layer 0 holds a look-back head, layer 1 a match-and-copy head in every KV group. Everything else starts
random, with silent output projections, and all weights train.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 2048
END_ID, IM_END_ID = 0, 2

NAMES = ("large", "small")
_SHAPES: dict[str, dict[str, Any]] = {
    "large": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "small": {
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}


def config(name: str) -> Any:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        attention_bias=False,
        use_sliding_window=False,
        bos_token_id=END_ID,
        eos_token_id=IM_END_ID,
        pad_token_id=END_ID,
        **_SHAPES[name],
    )


def frequencies(cfg: Any) -> Tensor:
    """Radians per token of every rotary pair; pair i is dimensions i and i + head_dim / 2."""
    half = cfg.head_dim // 2
    theta = float(cfg.rope_parameters["rope_theta"])
    return theta ** (-torch.arange(half, dtype=torch.float64) / half)


def _orthogonal(rows: int, width: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(width, rows, generator=generator))[0].T


@torch.no_grad()
def build(name: str, seed: int) -> Any:
    """A fresh model with the rough circuit in layers 0 and 1."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config(name))
    generator = torch.Generator().manual_seed(seed)
    hidden = model.config.hidden_size
    head = model.config.head_dim
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    basis = _orthogonal(3 * head + head, hidden, generator)
    content, previous, copied = basis[:head], basis[head : 2 * head], basis[2 * head :]
    constant = _embeddings(model, previous, generator)
    _look_back(model, constant, content, previous)
    _match_and_copy(model, content, previous, copied)
    return model


def _embeddings(model: Any, previous: Tensor, generator: torch.Generator, std: float = 0.04) -> Tensor:
    """Random embeddings that leave the `previous` subspace empty and share one constant direction, returned."""
    weight = model.model.embed_tokens.weight
    table = torch.randn(weight.shape, generator=generator) * std
    constant = torch.randn(weight.shape[1], generator=generator)
    constant -= previous.T @ (previous @ constant)
    constant /= constant.norm()
    table -= (table @ previous.T) @ previous
    table += 4 * std * constant - (table @ constant)[:, None] * constant * 0.5
    weight.copy_(table)
    return constant


def _look_back(model: Any, constant: Tensor, content: Tensor, previous: Tensor) -> None:
    """Layer 0, query head 0: the fast rotary pairs make one token back the best match, whatever it is."""
    cfg, attention = model.config, model.model.layers[0].self_attn
    head, half = cfg.head_dim, cfg.head_dim // 2
    fast = slice(0, 6 if head >= 64 else 5)
    angle = frequencies(cfg).float()
    query, key = torch.zeros(head), torch.zeros(head)
    query[:half][fast] = torch.cos(-angle)[fast]
    query[half:][fast] = torch.sin(-angle)[fast]
    key[:half][fast] = 1.0
    attention.q_proj.weight[:head] = query[:, None] * constant
    attention.k_proj.weight[:head] = key[:, None] * constant
    attention.v_proj.weight[:head] = content
    attention.o_proj.weight[:, :head] = previous.T * 0.08
    for norm in (attention.q_norm.weight, attention.k_norm.weight):
        norm[:half][fast] = 2.5
        norm[half:][fast] = 2.5


def _match_and_copy(model: Any, content: Tensor, previous: Tensor, copied: Tensor) -> None:
    """Layer 1, first query head of each KV group: find where this token came before, and say what followed it."""
    cfg, attention = model.config, model.model.layers[1].self_attn
    head, half = cfg.head_dim, cfg.head_dim // 2
    slow = torch.nonzero(frequencies(cfg) < (1 / 512 if head >= 64 else 1 / 100)).flatten()
    rows = torch.cat([slow, slow + half])
    group = cfg.num_attention_heads // cfg.num_key_value_heads
    for kv in range(cfg.num_key_value_heads):
        q, k = slice(kv * group * head, (kv * group + 1) * head), slice(kv * head, (kv + 1) * head)
        for weight, source in ((attention.q_proj.weight[q], content), (attention.k_proj.weight[k], previous)):
            weight.zero_()
            weight[rows] = source[: len(rows)]
        value = copied[kv * head : (kv + 1) * head]
        attention.v_proj.weight[k] = value
        attention.o_proj.weight[:, q] = value.T * 0.2
    for norm in (attention.q_norm.weight, attention.k_norm.weight):
        norm[rows] = 2.0
