"""Bytes of a page ↔ tensors, in the canonical layout of `keys.LAYOUT`.

    page bytes = K half then V half, each [token, layer, head, dim] bfloat16, K after RoPE

PyTorch rounds fp32 → bf16 to nearest even, which is what the pool stores (truncation would shrink magnitudes by 0.28 %).
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

from moonpool.errors import WrongSize
from moonpool.types import PageShape

# Pool views are read-only; torch has no read-only tensors and says so once per process. `unpack` tells its callers.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def unpack(page: memoryview | bytes, shape: PageShape) -> tuple[Tensor, Tensor]:
    """Zero-copy (k, v), each `[tokens, layers, heads, dim]` bfloat16, over the page's memory; do not write to them.

    Raises WrongSize if the page does not have `shape.nbytes` bytes.
    """
    if len(page) != shape.nbytes:
        raise WrongSize("page of the wrong size", need=f"{shape.nbytes} B ({shape})", have=f"{len(page)} B")
    raw = np.frombuffer(page, dtype=np.int16)
    kv = torch.from_numpy(raw).view(torch.bfloat16).view(2, shape.tokens, shape.layers, shape.heads, shape.dim)
    return kv[0], kv[1]


def pack_into(view: memoryview, k: Tensor, v: Tensor) -> None:
    """Write (k, v), each `[tokens, layers, heads, dim]` of any float type, into `view` as one bf16 page."""
    need = 2 * k.numel() * 2
    if len(view) != need or k.shape != v.shape:
        raise WrongSize("page of the wrong size", need=f"{need} B", have=f"{len(view)} B")
    out = torch.frombuffer(view, dtype=torch.bfloat16).view(2, *k.shape)
    out[0].copy_(k)
    out[1].copy_(v)


def pack(k: Tensor, v: Tensor) -> bytearray:
    """(k, v) as page bytes."""
    page = bytearray(2 * k.numel() * 2)
    pack_into(memoryview(page), k, v)
    return page
