"""`trunk`: one latent of the source's whole KV, read by every target layer (all-layer low-rank affine map).

    z = Σ over the source layers s:  x[s] · A[s]          [N, rank]
    y = z · B + b                                         all target layers and halves at once

Where `linear` reads a few layers at full rank, this reads all layers through `rank` numbers a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import msgspec
import torch
from torch import Tensor

from moonpool.c2c.projectors.base import KeySpace, Projector, take
from moonpool.c2c.projectors.linear import positive, typed
from moonpool.c2c.projectors.shell import check_shell, onto_shell


class TrunkParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source_layers: int
    source_width: int
    target_layers: int
    target_width: int
    rank: int
    key_space: KeySpace = "content"
    shell_dim: int = 0
    """head_dim of the target where keys are put on its shell, else 0."""
    eps: float = 1e-6


class TrunkProjector(Projector):
    kind: ClassVar[str] = "trunk"

    def __init__(
        self, parameters: TrunkParameters, down: Tensor, up: Tensor, biases: Tensor, shell: Tensor | None = None
    ) -> None:
        """fp32. `down`: `[source layers * 2 * source width, rank]`, layers in order, K before V. `up`: `[rank, target layers * 2 *
        target width]` likewise. `biases`: `[target layers, 2, target width]`. `shell`: `[target layers, shell_dim]`."""
        self._p, self._down, self._up, self._biases, self._shell = parameters, down, up, biases, shell
        self.key_space = parameters.key_space
        self.source_shape = (parameters.source_layers, parameters.source_width)
        self.target_shape = (parameters.target_layers, parameters.target_width)
        self.target_head_dim = parameters.shell_dim

    def source_layers(self) -> list[int]:
        return list(range(self._p.source_layers))

    def project(self, x: Tensor, latent: Tensor | None = None) -> Tensor:
        """`latent` `[N, rank]`: what the sum over the layers is added to, in place."""
        read = x.flatten(1)  # one product over all layers: a sum over them would go through the latent once for each
        latent = torch.mm(read, self._down) if latent is None else latent.addmm_(read, self._down)
        y = torch.addmm(self._biases.flatten(), latent, self._up).view(len(x), *self._biases.shape)
        if self._shell is not None:
            onto_shell(y[:, :, 0], self._shell, self._p.eps)
        return y

    def flops_per_token(self) -> int:
        return 2 * (self._down.numel() + self._up.numel())

    def parameters(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(self._p))

    def tensors(self) -> dict[str, Tensor]:
        found = {"down.weight": self._down, "up.weight": self._up, "bias": self._biases}
        return found if self._shell is None else {**found, "shell": self._shell}

    @classmethod
    def build(cls, parameters: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        p: TrunkParameters = typed(parameters, TrunkParameters)
        positive(p, "source_layers", "source_width", "target_layers", "target_width", "rank")
        check_shell(p.shell_dim, p.target_width, p.eps)
        down = take(tensors, "down.weight", (p.source_layers * 2 * p.source_width, p.rank))
        up = take(tensors, "up.weight", (p.rank, p.target_layers * 2 * p.target_width))
        shell = take(tensors, "shell", (p.target_layers, p.shell_dim)) if p.shell_dim else None
        return cls(p, down, up, take(tensors, "bias", (p.target_layers, 2, p.target_width)), shell)
