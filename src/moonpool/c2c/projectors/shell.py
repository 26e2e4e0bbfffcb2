"""The target's key shell: RMS-normalised per head and scaled by its `k_norm` gain, as a model with QK-norm leaves its own keys."""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.errors import BundleCorrupt


def onto_shell(keys: Tensor, gains: Tensor, eps: float) -> None:
    """In place. `keys` `[N, layers, heads * dim]`, `gains` `[layers, dim]`."""
    heads = keys.unflatten(-1, (-1, gains.shape[-1]))
    heads.mul_(torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)).mul_(gains[None, :, None, :])


def check_shell(shell_dim: int, target_width: int, eps: float) -> None:
    """Raises BundleCorrupt unless `shell_dim` is 0 (no shell) or a head_dim of the target."""
    if shell_dim < 0 or (shell_dim and target_width % shell_dim) or not 0 < eps < 1:
        need = f"a divisor of {target_width}, 0 < eps < 1"
        raise BundleCorrupt("impossible key shell", need=need, have=f"{shell_dim}, eps {eps}")
