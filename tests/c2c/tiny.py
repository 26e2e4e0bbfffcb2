"""Real model folders of a few thousand weights, with a byte-level BPE trained here."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from moonpool.c2c.fitting.facts_words import NAMES, VALUES

_FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
FAMILIES = sorted(_FAMILIES)


def text(seed: int, words: int = 400) -> str:
    """Sentences of the fact words."""
    rng = random.Random(seed)
    lines = [
        f"{rng.choice(NAMES)} saw a {rng.choice(VALUES)} near the {rng.choice(VALUES)}." for _ in range(words // 7)
    ]
    return "\n".join(lines)


@functools.cache
def _bpe() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text(i) for i in range(4)], trainer)
    return str(tokenizer.to_str())


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_bpe()), eos_token="<|end|>")


def tiny_model(folder: Path, family: str = "qwen3", *, layers: int = 3, dim: int = 16, seed: int = 0) -> Path:
    """A saved model with random weights, wide enough that its context matters, and the common tokenizer."""
    config_kind, model_kind = _FAMILIES[family]
    torch.manual_seed(seed)
    config = config_kind(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=dim,
        max_position_embeddings=1024,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = model_kind(config)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def documents(count: int, length: int, seed: int = 0) -> list[torch.Tensor]:
    """Token documents of exactly this length."""
    encode = tokenizer().encode
    return [torch.tensor(encode(text(seed + i, 4 * length))[:length]) for i in range(count)]
