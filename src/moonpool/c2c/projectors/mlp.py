"""`mlp`: Linear+GELU → Linear+GELU → Linear × gate, per target layer and half, from one source layer (issue #1520's shape).

With `key_space = "rotated"` it is the issue's recipe (keys go in and come out as stored); with `"content"` it works on
un-rotated keys. K is made from K and V from V, as the issue has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import gelu

from moonpool.c2c.projectors.base import KeySpace, Projector, take
from moonpool.c2c.projectors.linear import positive, typed
from moonpool.errors import BundleCorrupt, ConversionRefused


class MlpParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source_layers: int
    source_width: int
    target_layers: int
    target_width: int
    hidden: int
    sources: list[int]
    """`[target layer]` → its one source layer."""
    key_space: KeySpace = "rotated"


class MlpWeights(msgspec.Struct, frozen=True):
    """Stacked over `[target layer, half]`."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    w3: Tensor
    b3: Tensor
    gate: Tensor
    """Logits `[target layers, 2]`; the output is scaled by their sigmoid."""


def aligned(source_layers: int, target_layers: int, how: Literal["last", "depth"]) -> list[int]:
    """The one source layer of each target layer. `last`: both models' last layers go together, and so on downwards (issue
    #1520); `depth`: the layer at the same share of the depth.

    Raises ConversionRefused where `last` leaves target layers without a source: they are never made up.
    """
    if how == "depth":
        steps = max(target_layers - 1, 1)
        return [(2 * t * (source_layers - 1) + steps) // (2 * steps) for t in range(target_layers)]
    shift = source_layers - target_layers
    if shift < 0:
        raise ConversionRefused(
            f"the source has no layers for target layers 0..{-shift - 1}",
            need=f"{target_layers} layers",
            have=f"{source_layers}",
            fix="Align by depth.",
        )
    return [t + shift for t in range(target_layers)]


class MlpProjector(Projector):
    kind: ClassVar[str] = "mlp"

    def __init__(self, parameters: MlpParameters, weights: MlpWeights) -> None:
        self._p, self._w = parameters, weights
        self.key_space = parameters.key_space
        self.source_shape = (parameters.source_layers, parameters.source_width)
        self.target_shape = (parameters.target_layers, parameters.target_width)

    def source_layers(self) -> list[int]:
        return sorted(set(self._p.sources))

    def project(self, x: Tensor) -> Tensor:
        y = x.new_empty(x.shape[0], self._p.target_layers, 2, self._p.target_width)
        for t, source in enumerate(self._p.sources):
            for half in (0, 1):
                y[:, t, half] = self._apply(x[:, source, half], t, half)
        return y

    def _apply(self, x: Tensor, t: int, half: int) -> Tensor:
        w = self._w
        h = gelu(torch.addmm(w.b1[t, half], x, w.w1[t, half]))
        h = gelu(torch.addmm(w.b2[t, half], h, w.w2[t, half]))
        return torch.addmm(w.b3[t, half], h, w.w3[t, half]).mul_(torch.sigmoid(w.gate[t, half]))

    def flops_per_token(self) -> int:
        return 2 * (self._w.w1.numel() + self._w.w2.numel() + self._w.w3.numel())

    def parameters(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(self._p))

    def tensors(self) -> dict[str, Tensor]:
        return {_stored_name(f): getattr(self._w, f) for f in MlpWeights.__struct_fields__}

    @classmethod
    def build(cls, parameters: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        p: MlpParameters = typed(parameters, MlpParameters)
        positive(p, "source_layers", "source_width", "target_layers", "target_width", "hidden")
        if len(p.sources) != p.target_layers or not all(0 <= s < p.source_layers for s in p.sources):
            raise BundleCorrupt("a target layer has no source layer", need=str(p.target_layers), have=str(p.sources))
        lead = (p.target_layers, 2)
        shapes = {
            "w1": (*lead, p.source_width, p.hidden),
            "b1": (*lead, p.hidden),
            "w2": (*lead, p.hidden, p.hidden),
            "b2": (*lead, p.hidden),
            "w3": (*lead, p.hidden, p.target_width),
            "b3": (*lead, p.target_width),
            "gate": lead,
        }
        return cls(p, MlpWeights(**{name: take(tensors, _stored_name(name), shape) for name, shape in shapes.items()}))


def _stored_name(field: str) -> str:
    """`w1` → `1.weight`, `b1` → `1.bias`: the bundle stores what is called a weight in its own precision."""
    kinds = {"w": "weight", "b": "bias"}
    return f"{field[1:]}.{kinds[field[0]]}" if field[0] in kinds else field
