"""Small models for the C2C tests: specs out of nothing, and folders as transformers would save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moonpool.c2c.signature import ModelSpec, RopeSpec

ROPES = {
    "default": RopeSpec(theta=10000.0),
    "linear": RopeSpec(theta=10000.0, kind="linear", factor=4.0),
    "llama3": RopeSpec(
        theta=500000.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=8192,
    ),
    "yarn": RopeSpec(theta=1000000.0, kind="yarn", factor=4.0, original_max_positions=32768),
}
"""One of each kind; `with_rope` fits the rotated width to a head."""

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "vocab_size": 300,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "dtype": "bfloat16",
}

TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": 3, "content": "<|end|>", "special": True}],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "dropout": None, "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}


def spec(
    name: str = "tiny",
    *,
    layers: int = 3,
    heads: int = 2,
    dim: int = 8,
    rope: RopeSpec | None = None,
    rotary_dim: int = 0,
    revision: str = "r1",
    tokenizer: str = "t1",
    qk_norm: bool = False,
) -> ModelSpec:
    """A model's parameters; `rope` is fitted to `rotary_dim` (the whole head by default)."""
    return ModelSpec(
        name=name,
        revision=revision,
        tokenizer=tokenizer,
        model_type="qwen3" if qk_norm else "qwen2",
        num_layers=layers,
        num_heads=2 * heads,
        num_kv_heads=heads,
        head_dim=dim,
        hidden=2 * heads * dim,
        rope=with_dim(rope or ROPES["default"], rotary_dim or dim),
        qk_norm=qk_norm,
        dtype="bfloat16",
        max_positions=4096,
        vocab_size=300,
    )


def with_dim(rope: RopeSpec, rotary_dim: int) -> RopeSpec:
    return RopeSpec(**{f: getattr(rope, f) for f in RopeSpec.__struct_fields__} | {"rotary_dim": rotary_dim})


def model_folder(
    folder: Path, config: dict[str, Any] | None = None, tokenizer: dict[str, Any] | None = None, seed: int = 0
) -> Path:
    """A model folder with `CONFIG` changed by `config` (`...` removes a field); its weights are one small random matrix."""
    merged = {k: v for k, v in {**CONFIG, **(config or {})}.items() if v is not ...}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(merged))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer or TOKENIZER))
    weights = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    save_file({"w": weights}, folder / "model.safetensors")
    return folder
