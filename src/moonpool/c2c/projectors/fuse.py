"""`fuse`: the published C2C fuser (arXiv 2510.03215), which improves a cache that the target has made itself.

For each target layer and half, with the source's vector `s` of one aligned layer and the target's own `y` of the same token:

    h = in([s, y])                          affine, no activation
    h = ffn(h)                              shared trunk
    y + gate · sigmoid(scalar(ffn(h))) · out(ffn…(h))        one scalar a head; gate = 1 where its logit is positive, else 0
    ffn(x) = x + w2 · gelu(w1 · rms_norm(x))

Keys are taken and given as stored, rotated on both sides. Because half of `in` multiplies the target's own cache and the result
is added to it, none of this means anything where the target has not prefilled: a `Fuser` is no `Projector`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, rms_norm

from moonpool.c2c.projectors.base import Stored, take
from moonpool.c2c.projectors.linear import positive, typed
from moonpool.errors import BundleCorrupt

HALVES = ("key", "value")
NATIVE = -1
"""In `sources`: this target layer stays as the target made it."""
_EPS = 1e-6


class FuseParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source_layers: int
    source_heads: int
    source_head_dim: int
    target_layers: int
    target_heads: int
    target_head_dim: int
    hidden: int
    intermediate: int
    blocks: int
    """Feed-forward blocks between the trunk and the projected feature."""
    sources: list[int]
    """`[target layer]` → its one source layer, or `NATIVE`."""

    @property
    def source_width(self) -> int:
        return self.source_heads * self.source_head_dim

    @property
    def target_width(self) -> int:
        return self.target_heads * self.target_head_dim


def layer_shapes(p: FuseParameters) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one target layer's weights, both halves; they are the published checkpoints' own names."""
    return {f"{half}_{name}": shape for half in HALVES for name, shape in _half_shapes(p).items()}


def _half_shapes(p: FuseParameters) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "in.weight": (p.hidden, p.source_width + p.target_width),
        "in.bias": (p.hidden,),
        "proj_out.weight": (p.target_width, p.hidden),
        "proj_out.bias": (p.target_width,),
        "scalar_head.weight": (p.target_heads, p.hidden),
        "scalar_head.bias": (p.target_heads,),
        "gate_logit": (),
    }
    inner = [("mlp1.blocks.0", p.intermediate), ("scalar_mlp2.blocks.0", p.hidden)]
    inner += [(f"proj_mlp2.blocks.{b}", p.intermediate) for b in range(p.blocks)]
    for block, width in inner:
        shapes[f"{block}.norm.weight"] = (p.hidden,)
        shapes[f"{block}.w1.weight"] = (width, p.hidden)
        shapes[f"{block}.w2.weight"] = (p.hidden, width)
    return shapes


class FuseStep(NamedTuple):
    """One network that has something to add."""

    layer: int
    """Of the target."""
    half: int
    """0 = K, 1 = V."""
    source: int
    """Layer of the source that it reads."""


@dataclass(frozen=True, slots=True)
class _Network:
    """One half of one target layer."""

    weights: Mapping[str, Tensor]
    blocks: int
    heads: int

    @property
    def open(self) -> bool:
        return bool(self.weights["gate_logit"] > 0)

    def __call__(self, source: Tensor, target: Tensor) -> Tensor:
        h = self._trunk(torch.cat([source, target], -1))
        feature = h
        for b in range(self.blocks):
            feature = self._block(f"proj_mlp2.blocks.{b}", feature)
        feature = self._linear("proj_out", feature).unflatten(-1, (self.heads, -1))
        scalar = self._linear("scalar_head", self._block("scalar_mlp2.blocks.0", h))
        return target + (torch.sigmoid(scalar)[..., None] * feature).flatten(-2)

    def _trunk(self, x: Tensor) -> Tensor:
        return self._block("mlp1.blocks.0", self._linear("in", x))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _block(self, name: str, x: Tensor) -> Tensor:
        norm, w1, w2 = (self.weights[f"{name}.{part}.weight"] for part in ("norm", "w1", "w2"))
        return x + linear(gelu(linear(rms_norm(x, norm.shape, norm, _EPS), w1)), w2)

    def flops(self) -> int:
        return 2 * sum(w.numel() for w in self.weights.values() if w.dim() == 2)


class Fuser(Stored):
    """Networks of all target layers. Memory: 4 B × weights."""

    kind: ClassVar[str] = "fuse"

    def __init__(self, parameters: FuseParameters, layers: Sequence[Mapping[str, Tensor]]) -> None:
        """`layers[t]`: fp32 weights as `layer_shapes` names them; empty where the layer stays native."""
        self.shape = parameters
        self._layers = layers
        self._networks = {
            (t, half): _Network(_of_half(weights, name), parameters.blocks, parameters.target_heads)
            for t, weights in enumerate(layers)
            for half, name in enumerate(HALVES)
            if weights
        }

    def steps(self) -> list[FuseStep]:
        """What there is to do, by target layer; halves whose gate is shut are not among it."""
        return [FuseStep(t, half, self.shape.sources[t]) for (t, half), n in self._networks.items() if n.open]

    def source_layers(self) -> list[int]:
        """Source layers that are read at all, ascending."""
        return sorted({s.source for s in self.steps()})

    def fuse(self, step: FuseStep, source: Tensor, target: Tensor) -> Tensor:
        """The step's half of its target layer, fused: `source` `[N, source width]` and `target` `[N, target width]`, both fp32
        and for the same tokens, keys as stored → fp32 `[N, target width]`. Writes to neither."""
        return self._networks[step.layer, step.half](source, target)

    def to(self, device: torch.device) -> Fuser:
        """The same on another device."""
        return Fuser(self.shape, [{n: w.to(device) for n, w in layer.items()} for layer in self._layers])

    def flops_per_token(self) -> int:
        return sum(n.flops() for n in self._networks.values() if n.open)

    def parameters(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(self.shape))

    def tensors(self) -> dict[str, Tensor]:
        return {stored_name(t, n): w for t, layer in enumerate(self._layers) for n, w in layer.items()}

    @classmethod
    def build(cls, parameters: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        p: FuseParameters = typed(parameters, FuseParameters)
        check_parameters(p)
        return cls(p, [_take_layer(p, t, tensors) for t in range(p.target_layers)])


def stored_name(layer: int, name: str) -> str:
    """A weight's name in the bundle's file."""
    return f"layers.{layer}.{name}"


def _take_layer(p: FuseParameters, layer: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if p.sources[layer] == NATIVE:
        return {}
    return {name: take(tensors, stored_name(layer, name), shape) for name, shape in layer_shapes(p).items()}


def _of_half(weights: Mapping[str, Tensor], half: str) -> dict[str, Tensor]:
    return {n.removeprefix(f"{half}_"): w for n, w in weights.items() if n.startswith(f"{half}_")}


def check_parameters(p: FuseParameters) -> None:
    """Raises BundleCorrupt for sizes below 1 and for target layers without an existing source layer."""
    positive(p, *_sizes())
    known = {NATIVE, *range(p.source_layers)}
    if len(p.sources) != p.target_layers or not known.issuperset(p.sources):
        need = f"{p.target_layers} layers of 0..{p.source_layers - 1}, or {NATIVE}"
        raise BundleCorrupt("impossible source layers", key="manifest.json", need=need, have=str(p.sources))


def _sizes() -> Iterator[str]:
    return (f for f in FuseParameters.__struct_fields__ if f != "sources")
