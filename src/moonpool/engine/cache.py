"""KV of running sequences, and how Transformers' attention reads it.

**The rounding invariant.** The pool holds bf16. So that a page from the pool and the same page computed here are the *same
numbers*, every key and value is rounded through bf16 the moment it enters the cache, before any attention reads it, the
chunk's own keys included. No code path ever attends to an unrounded value, so a pooled prefix changes nothing but the order
of additions inside matrix products (and not even that when chunks are one page long, see `Scheduler`).

**Ragged batches.** A decode batch is not padded. `RaggedCache.update` hands each sequence's own keys to `ragged_attention`,
which calls Transformers' SDPA once per sequence; only the linear layers see the batch. A row's attention is therefore the
very same call whether the row runs alone or among others, sequences join and leave without copying, and no mask can be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from moonpool.types import PageShape

ATTENTION = "moonpool_ragged"
_GROW_TOKENS = 256


class SequenceKV:
    """Keys and values of one sequence, each `[layers, heads, capacity, dim]`, valid in `[0, length)`.

    Values are bf16 numbers held in the compute type. What lies below `length` is never written again, so views of it (see
    `tokens`) stay right while the sequence grows, also when growing moves it to other memory. (Only `engine.speculative` takes
    `length` back, within the answer, of which nobody has a view before its end.)
    """

    def __init__(self, shape: PageShape, *, dtype: torch.dtype, device: torch.device, capacity: int) -> None:
        self._dims = (shape.layers, shape.heads, capacity, shape.dim)
        self.keys = torch.empty(self._dims, dtype=dtype, device=device)
        self.values = torch.empty(self._dims, dtype=dtype, device=device)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def reserve(self, tokens: int) -> None:
        """Room for `tokens` tokens in all; grows by at least half, so that appending stays linear."""
        if tokens <= self.capacity:
            return
        capacity = max(tokens, self.capacity * 3 // 2, self.capacity + _GROW_TOKENS)
        self.keys, self.values = self._moved(self.keys, capacity), self._moved(self.values, capacity)

    def _moved(self, old: Tensor, capacity: int) -> Tensor:
        layers, heads, held, dim = old.shape
        new = torch.empty((layers, heads, capacity, dim), dtype=old.dtype, device=old.device)
        new[:, :, :held] = old
        return new

    def copy(self) -> SequenceKV:
        """The same KV in memory of its own."""
        made = SequenceKV.__new__(SequenceKV)
        made._dims, made.length = self._dims, self.length
        made.keys, made.values = self._moved(self.keys, self.capacity), self._moved(self.values, self.capacity)
        return made

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Put (k, v), each `[tokens, layers, heads, dim]`, at token `start`. `length` stays; the caller moves it."""
        end = start + k.shape[0]
        self.reserve(end)
        self.keys[:, :, start:end] = k.permute(1, 2, 0, 3)
        self.values[:, :, start:end] = v.permute(1, 2, 0, 3)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Round one layer's new (k, v), each `[heads, q, dim]`, into place behind `length`.

        Returns all keys and values of the layer, each `[1, heads, length + q, dim]`. `length` moves after the last layer.
        """
        end = self.length + k.shape[1]
        self.keys[layer, :, self.length : end] = k.bfloat16()
        self.values[layer, :, self.length : end] = v.bfloat16()
        return self.keys[layer : layer + 1, :, :end], self.values[layer : layer + 1, :, :end]

    def tokens(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Views of (k, v) of tokens `[start, end)`, each `[tokens, layers, heads, dim]`; bf16 numbers."""
        return self.keys[:, :, start:end].permute(2, 0, 1, 3), self.values[:, :, start:end].permute(2, 0, 1, 3)


class RaggedCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Transformers' cache interface over several sequences: row i of the batch is `sequences[i]`."""

    def __init__(self, sequences: Sequence[SequenceKV]) -> None:
        super().__init__(layers=[])
        self.sequences = sequences

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """New states `[batch, heads, q, dim]` in; per row all of its keys and values out, for `ragged_attention` only."""
        pairs = [s.append(layer_idx, key_states[i], value_states[i]) for i, s in enumerate(self.sequences)]
        return [k for k, _ in pairs], [v for _, v in pairs]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest row. Positions are always passed explicitly, so the model never infers them from this."""
        return max(s.length for s in self.sequences)


def ragged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: list[Tensor],
    value: list[Tensor],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """SDPA row by row: `query` `[batch, heads, q, dim]` against row i's own `key[i]`; out `[batch, q, heads, dim]`."""
    rows = [
        sdpa_attention_forward(module, query[i : i + 1], k, v, attention_mask, **kwargs)[0]
        for i, (k, v) in enumerate(zip(key, value, strict=True))
    ]
    return (rows[0] if len(rows) == 1 else torch.cat(rows)), None


def causal_mask(length: int, new: int, device: torch.device) -> Tensor | None:
    """Bool `[1, 1, new, length + new]`: new token i sees the `length` old ones and the new ones up to itself.

    None where attention needs none: a single new token sees everything, and without old tokens SDPA masks by itself.
    """
    if new == 1 or length == 0:
        return None
    return torch.ones(new, length + new, dtype=torch.bool, device=device).tril(length)[None, None]


# No mask function is registered under this name, so Transformers makes no mask of its own and passes ours through.
AttentionInterface.register(ATTENTION, ragged_attention)
