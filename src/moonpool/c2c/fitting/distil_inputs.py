"""What distillation reads of the captures: only the tokens of a prefix, only the source layers that the projector reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors import safe_open
from torch import Tensor

from moonpool.c2c.fitting.capture import KV, CaptureStore
from moonpool.c2c.fitting.distil_lessons import Cut
from moonpool.c2c.fitting.distil_pupils import Scale
from moonpool.c2c.fitting.features import rows
from moonpool.c2c.projectors.base import Projector
from moonpool.c2c.rope import attention_factor, inverse_frequencies
from moonpool.c2c.signature import RopeSpec
from moonpool.errors import ConversionRefused

_SCALE_DOCUMENTS = 32
_SAMPLE = 64
"""Rows of each of them that stay in memory."""


def read(store: CaptureStore, tokens: Tensor, start: int, end: int) -> KV:
    """bf16 KV of `tokens[start:end]`; the rest of the file is not read."""
    path = store.path(tokens)
    if not path.is_file():
        return store.get(tokens)[start:end]
    with safe_open(path, framework="pt") as f:
        return KV(*(f.get_slice(name)[start:end] for name in ("k", "v")))


class Inputs:
    """Source KV of lessons as a pupil takes it."""

    def __init__(self, projector: Projector, source: CaptureStore) -> None:
        """Raises ConversionRefused for keys that a projector cannot make anew (`invariant`)."""
        if projector.key_space == "invariant":
            raise ConversionRefused(
                "only projectors in content space or on rotated keys are distilled", have="invariant"
            )
        self._source, self._layers = source, projector.source_layers()
        self.content = projector.key_space == "content"
        """Keys are un-rotated; else they go in, and come out, as stored."""
        self._rope = source.spec.rope if self.content else None
        whole = len(self._layers) == source.spec.num_layers
        self._at: Sequence[int] | slice = slice(None) if whole else self._layers

    def raw(self, tokens: Tensor, start: int, end: int) -> Tensor:
        """fp32 `[end - start, layers read, 2, width]`."""
        kv = read(self._source, tokens, start, end)
        return rows(KV(kv.k[:, self._at], kv.v[:, self._at]), self._rope, start=start)

    def scale(self, documents: Sequence[Tensor]) -> Scale:
        """Mean and deviation over documents spread among these, position 0 left out."""
        chosen = [documents[i] for i in _spread(len(documents), _SCALE_DOCUMENTS)]
        total = squares = torch.zeros(())
        count, sample = 0, list[Tensor]()
        for tokens in chosen:
            x = self.raw(tokens, 1, len(tokens))
            sample.append(x[_spread(len(x), _SAMPLE)])
            count, x64 = count + len(x), x.to(torch.float64)
            total, squares = total + x64.sum(0), squares + x64.square().sum(0)
        mean = total / count
        deviation = (squares / count - mean.square()).clamp(min=0).sqrt().clamp(min=1e-4).float()
        return Scale(mean.float(), deviation, (torch.cat(sample) - mean.float()) / deviation)

    def standardised(self, cuts: Sequence[Cut], start: int, scale: Scale, dtype: torch.dtype) -> Tensor:
        """`[Σ (prefix - start), layers read, 2, width]` in `dtype`, the lessons one behind the other. Centred before it is
        rounded: some keys' means are a hundred times their deviations."""
        sizes = [c.prefix - start for c in cuts]
        out = torch.empty(sum(sizes), *scale.mean.shape, dtype=dtype)
        for c, to in zip(cuts, out.split(sizes), strict=True):
            to.copy_(self.raw(c.tokens, start, c.prefix).sub_(scale.mean).div_(scale.deviation))
        return out


def _spread(count: int, most: int) -> list[int]:
    """At most `most` indices spread evenly over `count`."""
    return [i * count // min(count, most) for i in range(min(count, most))]


class Turn:
    """Differentiable twin of `rope.rotation`, for positions that are known from the start."""

    def __init__(self, rope: RopeSpec, length: int, device: torch.device) -> None:
        self.length = length
        angles = torch.arange(length, dtype=torch.float64)[:, None] * inverse_frequencies(rope)
        scale = attention_factor(rope)
        self._cos, self._sin = ((f(angles) * scale).float()[:, None, None].to(device) for f in (torch.cos, torch.sin))

    def __call__(self, k: Tensor, positions: Tensor) -> Tensor:
        """Content keys fp32 `[N, layers, heads, dim]` → keys as stored."""
        cos, sin = self._cos[positions], self._sin[positions]
        half = cos.shape[-1]
        first, second, rest = k[..., :half], k[..., half : 2 * half], k[..., 2 * half :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
