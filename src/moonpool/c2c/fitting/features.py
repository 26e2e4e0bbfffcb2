"""KV of a document as rows for a fit: keys in content space (un-rotated), K and V of a layer side by side.

The layout is the projectors': `[tokens, layers, 2, width]` (see `projectors.base`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.c2c.fitting.capture import KV
from moonpool.c2c.rope import rotate, unrotate
from moonpool.c2c.signature import RopeSpec


def rows(kv: KV, rope: RopeSpec | None, *, start: int = 0) -> Tensor:
    """fp32 `[N, layers, 2, heads * dim]` of tokens at positions `start…`; with `rope` None keys stay rotated."""
    k, v = kv.k.to(torch.float32), kv.v.to(torch.float32)
    if rope is not None:
        k = unrotate(k, torch.arange(start, start + len(kv)), rope)
    return torch.stack([k.flatten(2), v.flatten(2)], dim=2)


def kv_of(x: Tensor, heads: int, rope: RopeSpec | None, *, start: int = 0) -> KV:
    """Inverse of `rows`, fp32."""
    k, v = (x[:, :, half].unflatten(-1, (heads, -1)).contiguous() for half in (0, 1))
    if rope is not None:
        k = rotate(k, torch.arange(start, start + len(x)), rope)
    return KV(k, v)
