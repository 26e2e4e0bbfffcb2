"""Rotary position embedding, applied and taken off.

Angles are computed in fp64: at position 100 000 an fp32 product already misses by 0.01 rad. Stored keys carry their rotation
and no position, so every function takes the absolute positions.

`rotate_between` is for projectors that leave the content as it is: un-rotating and rotating again in fp32 costs the smaller
component of a pair its low bits, one rotation by the *difference* of the angles does not, and for equal embeddings it is
the identity.
"""

from __future__ import annotations

import math
from copy import copy

import torch
from torch import Tensor

from moonpool.c2c.signature import RopeSpec


def inverse_frequencies(rope: RopeSpec) -> Tensor:
    """Radians per position of each pair, fp64 `[rotary_dim / 2]`. Same formulas as transformers' `ROPE_INIT_FUNCTIONS`."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim
    plain = rope.theta**-exponents
    match rope.kind:
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(plain, rope)
        case _:
            return plain


def _llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    wavelength = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (rope.original_max_positions / wavelength - low) / (high - low)
    return torch.lerp(plain / rope.factor, plain, blend.clamp(0, 1))


def _yarn(plain: Tensor, rope: RopeSpec) -> Tensor:
    def dim_of(rotations: float) -> float:
        return (
            rope.rotary_dim
            * math.log(rope.original_max_positions / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low or 0.001
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float64) - low) / width
    return torch.lerp(plain, plain / rope.factor, ramp.clamp(0, 1))


def attention_factor(rope: RopeSpec) -> float:
    """What transformers multiplies cos and sin by (yarn only)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


class Rotation:
    """Rotation of keys at given positions; tables are fp32, made from fp64 angles, `[N, 1, 1, rotary_dim / 2]`."""

    def __init__(self, positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> None:
        angles = positions.to(torch.float64)[:, None] * frequencies
        self._cos = (angles.cos() * scale).to(torch.float32)[:, None, None, :]
        self._sin = (angles.sin() * scale).to(torch.float32)[:, None, None, :]

    def rows(self, rows: slice) -> Rotation:
        """The same at these of the positions. Tables are views."""
        part = copy(self)
        part._cos, part._sin = self._cos[rows], self._sin[rows]
        return part

    def apply(self, k: Tensor, out: Tensor | None = None) -> Tensor:
        """Rotated `k`, fp32 `[N, layers, heads, dim]`; dims past the tables' are copied. `out` must not overlap `k`."""
        half = self._cos.shape[-1]
        result = torch.empty_like(k) if out is None else out
        first, second = k[..., :half], k[..., half : 2 * half]
        torch.mul(first, self._cos, out=result[..., :half]).addcmul_(second, self._sin, value=-1)
        torch.mul(second, self._cos, out=result[..., half : 2 * half]).addcmul_(first, self._sin)
        if 2 * half < k.shape[-1]:
            result[..., 2 * half :] = k[..., 2 * half :]
        return result


def rotation(positions: Tensor, rope: RopeSpec) -> Rotation:
    """Puts this embedding on un-rotated keys."""
    return Rotation(positions, inverse_frequencies(rope), attention_factor(rope))


def inverse_rotation(positions: Tensor, rope: RopeSpec) -> Rotation:
    """Takes this embedding off."""
    return Rotation(positions, -inverse_frequencies(rope), 1 / attention_factor(rope))


def rotate(k: Tensor, positions: Tensor, rope: RopeSpec) -> Tensor:
    """Content keys → keys as stored. `k` fp32 `[N, layers, heads, dim]`, `positions` `[N]`."""
    return rotation(positions, rope).apply(k)


def unrotate(k: Tensor, positions: Tensor, rope: RopeSpec) -> Tensor:
    """Keys as stored → content keys. `k` fp32 `[N, layers, heads, dim]`, `positions` `[N]`."""
    return inverse_rotation(positions, rope).apply(k)


def rotate_between(k: Tensor, positions: Tensor, source: RopeSpec, target: RopeSpec) -> Tensor:
    """Keys stored under `source` as they would be stored under `target`: one rotation by the difference of the angles.

    `k` fp32 `[N, layers, heads, dim]`, `positions` `[N]`. Returns `k` itself, bit for bit, where the two embeddings turn alike
    (also when they are spelt differently); else a new tensor.
    """
    if source.rotary_dim != target.rotary_dim:
        return rotate(unrotate(k, positions, source), positions, target)
    turn = inverse_frequencies(target) - inverse_frequencies(source)
    ratio = attention_factor(target) / attention_factor(source)
    if ratio == 1.0 and not bool(turn.any()):
        return k  # a turn by 0; skipped because 1·x − 0·y still loses the sign of a zero
    return Rotation(positions, turn, ratio).apply(k)
