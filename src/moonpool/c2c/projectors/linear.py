"""`linear`: an affine map per target layer and half, reading K and V of a few source layers (c2c-design §2, F-k).

    y[t, half] = Σ over the layers s of S(t, half):  x[s] · W[t, half, s]  + b[t, half]

Optionally the mapped keys are put on the target's key shell: RMS-normalised per head and scaled by the target's `k_norm` gain,
which is what a model with QK-norm does to its own keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import msgspec
import torch
from torch import Tensor

from moonpool.c2c.projectors.base import KeySpace, Projector, take
from moonpool.errors import BundleCorrupt

_HALVES = ("k", "v")


class LinearParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source_layers: int
    source_width: int
    target_layers: int
    target_width: int
    sources: list[list[list[int]]]
    """`[target layer][half]` → ascending source layers."""
    key_space: KeySpace = "content"
    shell_dim: int = 0
    """head_dim of the target where keys are put on its shell, else 0."""
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class _Product:
    """One GEMM: columns `[start, stop)` of the flat source times `weight`, added to columns `[to, to + n)` of the flat target."""

    start: int
    stop: int
    to: int
    weight: Tensor


class LinearProjector(Projector):
    kind: ClassVar[str] = "linear"

    def __init__(
        self,
        parameters: LinearParameters,
        weights: Sequence[Sequence[Tensor]],
        biases: Tensor,
        shell: Tensor | None = None,
    ) -> None:
        """`weights[t][half]`: fp32 `[len(S) * 2 * source width, target width]`, rows in the order of S(t, half), K before V in
        each layer. `biases`: `[target layers, 2, target width]`. `shell`: `[target layers, shell_dim]`."""
        self._p, self._weights, self._biases, self._shell = parameters, weights, biases, shell
        self.key_space = parameters.key_space
        self.source_shape = (parameters.source_layers, parameters.source_width)
        self.target_shape = (parameters.target_layers, parameters.target_width)
        _check_sources(parameters)
        self._products = [p for t in range(parameters.target_layers) for p in self._layer_products(t)]

    def _layer_products(self, t: int) -> list[_Product]:
        """Halves that read the same layers share one product, and neighbouring layers are one run of columns."""
        sources, width = self._p.sources[t], self._p.target_width
        to = t * 2 * width
        if sources[0] == sources[1]:
            return self._runs(sources[0], torch.cat(list(self._weights[t]), dim=1), to)
        return [p for h in (0, 1) for p in self._runs(sources[h], self._weights[t][h], to + h * width)]

    def _runs(self, layers: list[int], weight: Tensor, to: int) -> list[_Product]:
        per_layer = 2 * self._p.source_width
        products: list[_Product] = []
        first = 0
        for i in range(1, len(layers) + 1):
            if i == len(layers) or layers[i] != layers[i - 1] + 1:
                rows = weight[first * per_layer : i * per_layer].contiguous()
                products.append(_Product(layers[first] * per_layer, (layers[i - 1] + 1) * per_layer, to, rows))
                first = i
        return products

    def source_layers(self) -> list[int]:
        return sorted({s for layer in self._p.sources for half in layer for s in half})

    def project(self, x: Tensor) -> Tensor:
        flat = x.reshape(x.shape[0], -1)
        y = self._biases.reshape(1, -1).repeat(x.shape[0], 1)
        for p in self._products:
            y[:, p.to : p.to + p.weight.shape[1]].addmm_(flat[:, p.start : p.stop], p.weight)
        y = y.view(x.shape[0], self._p.target_layers, 2, self._p.target_width)
        if self._shell is not None:
            self._to_shell(y[:, :, 0])
        return y

    def _to_shell(self, k: Tensor) -> None:
        assert self._shell is not None
        heads = k.unflatten(-1, (-1, self._p.shell_dim))
        norm = torch.rsqrt(heads.square().mean(-1, keepdim=True) + self._p.eps)
        heads.mul_(norm).mul_(self._shell[None, :, None, :])

    def flops_per_token(self) -> int:
        return sum(2 * p.weight.numel() for p in self._products)

    def shapes(self) -> list[tuple[int, int]]:
        """(rows, columns) of each GEMM's weight, for measuring the machine's own rate on the same shapes."""
        return [(p.weight.shape[0], p.weight.shape[1]) for p in self._products]

    def parameters(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(self._p))

    def tensors(self) -> dict[str, Tensor]:
        found = {
            f"layers.{t}.{_HALVES[h]}.weight": w for t, pair in enumerate(self._weights) for h, w in enumerate(pair)
        }
        found["bias"] = self._biases
        return found if self._shell is None else {**found, "shell": self._shell}

    @classmethod
    def build(cls, parameters: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        p = typed(parameters, LinearParameters)
        _check_sources(p)
        weights = [
            [
                take(tensors, f"layers.{t}.{name}.weight", (len(p.sources[t][h]) * 2 * p.source_width, p.target_width))
                for h, name in enumerate(_HALVES)
            ]
            for t in range(p.target_layers)
        ]
        shell = take(tensors, "shell", (p.target_layers, p.shell_dim)) if p.shell_dim else None
        return cls(p, weights, take(tensors, "bias", (p.target_layers, 2, p.target_width)), shell)


def _check_sources(p: LinearParameters) -> None:
    """Every target layer has sources that exist; a layer that lacks them is an error, never zeros."""
    if len(p.sources) != p.target_layers:
        raise BundleCorrupt("a target layer has no sources", need=f"{p.target_layers} layers", have=str(len(p.sources)))
    for t, halves in enumerate(p.sources):
        for name, layers in zip(_HALVES, halves, strict=True):
            ordered = sorted(set(layers)) == layers
            if not layers or not ordered or layers[0] < 0 or layers[-1] >= p.source_layers:
                raise BundleCorrupt(
                    f"target layer {t} reads impossible source layers for {name}",
                    need=f"ascending layers of 0..{p.source_layers - 1}",
                    have=str(layers),
                )


def typed(parameters: Mapping[str, Any], kind: type[msgspec.Struct]) -> Any:
    """Manifest values as the projector's own struct."""
    try:
        return msgspec.convert(dict(parameters), kind)
    except msgspec.ValidationError as e:
        raise BundleCorrupt(f"projector parameters: {e}", key="manifest.json") from e
