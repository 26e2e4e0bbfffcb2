"""Tiny random models with a byte-level tokenizer, made on the fly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
CORPUS = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs", "0123456789"] * 4


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: multi-byte characters span several tokens."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build(folder: Path, kind: str, seed: int) -> Path:
    """Save a 3-layer model of `kind` (`qwen3` or `llama`) and its tokenizer."""
    tok = tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": len(tok),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,  # the usual 0.02 gives flat logits, and greedy answers would hang on rounding noise
        "eos_token_id": tok.eos_token_id,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**sizes))
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder
