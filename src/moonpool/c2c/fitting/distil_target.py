"""The frozen target: a batch of continuations over prefixes of unequal lengths, and how far two of its answers differ."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from moonpool.c2c.fitting.capture import CausalModel

_ROWS = 64
"""Rows whose logits (4 B × vocabulary each, a few times over) are in memory together."""


class FrozenTarget(CausalModel):
    """The target model on a device, for training through it: gradients go into the prefix, never into the model."""

    def __init__(self, folder: str | Path, dtype: torch.dtype, device: torch.device, *, checkpointing: bool) -> None:
        """`checkpointing`: a layer's activations are computed again in the backward pass instead of kept."""
        super().__init__(folder, dtype, device)
        if checkpointing:
            layers = self._base.layers
            for i in range(len(layers)):
                layers[i] = _Checkpointed(layers[i])

    def states(self, prefixes: Sequence[tuple[Tensor, Tensor]], asked: Sequence[Tensor]) -> Tensor:
        """Last hidden states `[Σ asked, hidden]`, the lessons one behind the other.

        `prefixes`: K (rotated) and V of each lesson, `[prefix, layers, heads, dim]`; `asked`: the tokens behind it. Shorter prefixes
        are padded in front, shorter continuations behind, and nothing attends to the padding.
        """
        sizes, lengths = [len(k) for k, _ in prefixes], [len(a) for a in asked]
        tokens = pad_sequence(list(asked), batch_first=True).to(self.device)
        longest, steps = max(sizes), torch.arange(tokens.shape[1], device=self.device)
        starts = torch.tensor(sizes, device=self.device)
        mask = None
        if min(sizes) < longest:
            mask = torch.arange(longest + tokens.shape[1], device=self.device) >= (longest - starts)[:, None]
        inputs = {
            "input_ids": tokens,
            "position_ids": starts[:, None] + steps,
            "attention_mask": None if mask is None else mask.long(),
            "use_cache": True,
            self._cache_argument: self._injected(prefixes, longest),
        }
        states = self._base(**inputs).last_hidden_state
        return torch.cat([h[:n] for h, n in zip(states, lengths, strict=True)])

    def _injected(self, prefixes: Sequence[tuple[Tensor, Tensor]], longest: int) -> Any:
        k, v = (
            torch.stack([nn.functional.pad(p[i].to(self.dtype), (0,) * 6 + (longest - len(p[i]), 0)) for p in prefixes])
            .permute(2, 0, 3, 1, 4)
            .contiguous()
            for i in (0, 1)
        )
        cache = _injection()(config=self._model.config)
        cache.hold(k, v)
        return cache

    def divergence(self, said: Tensor, wanted: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """KL(wanted ‖ said) of the next-token distributions that follow from the hidden states `[N, hidden]`, nats.

        Returns its sum over rows times `weights` `[N]`, differentiable in `said`, and fp32 `[N]` without gradient.
        """
        return _HeadDivergence.apply(said, wanted, self._head.weight, self._head.bias, weights)


class _HeadDivergence(torch.autograd.Function):
    """Output layer, softmax and KL in one, some rows at a time. The gradient of KL in the logits is the difference of the two
    distributions, so it goes back through the output layer at once, and no `[N, vocabulary]` is kept."""

    @staticmethod
    def forward(
        ctx: Any, said: Tensor, wanted: Tensor, head: Tensor, bias: Tensor | None, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        found = torch.empty(len(said), device=said.device)
        gradient = torch.empty_like(said) if ctx.needs_input_grad[0] else None
        for at in torch.arange(len(said), device=said.device).split(_ROWS):
            rows = slice(int(at[0]), int(at[-1]) + 1)
            p, q = linear(torch.cat([wanted[rows], said[rows]]), head, bias).float().log_softmax(-1).chunk(2)
            wanted_p = p.exp()
            found[rows] = torch.linalg.vecdot(wanted_p, p.sub_(q))
            if gradient is not None:
                gradient[rows] = q.exp_().sub_(wanted_p).to(head.dtype) @ head
        if gradient is not None:
            ctx.save_for_backward(gradient, weights)
        ctx.mark_non_differentiable(found)
        return (found * weights).sum(), found

    @staticmethod
    def backward(ctx: Any, outer: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient, weights = ctx.saved_tensors
        return gradient * (outer * weights)[:, None].to(gradient.dtype), None, None, None, None


class _Checkpointed(nn.Module):
    """transformers' own checkpointing drops the cache; ours is safe to ask twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.layer(*args, **kwargs)
        return checkpoint(functools.partial(self.layer, **kwargs), *args, use_reentrant=False)


@functools.cache
def _injection() -> Any:
    """Class of a cache that holds a prefix and forgets what is computed over it."""
    from transformers import DynamicCache

    class Injection(DynamicCache):  # type: ignore[misc]  # transformers is untyped
        def hold(self, k: Tensor, v: Tensor) -> None:
            """`[layers, batch, heads, prefix, dim]`"""
            for layer in range(len(k)):
                super().update(k[layer], v[layer], layer)

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
        ) -> tuple[Any, Any]:
            held = self.layers[layer_idx]
            return torch.cat([held.keys, key_states], -2), torch.cat([held.values, value_states], -2)

    return Injection
