"""`linear`: an affine map per target layer and half, reading K and V of a few source layers (c2c-design §2, F-k).

    y[t, half] = Σ over the layers s of S(t, half):  x[s] · W[t, half, s]  + b[t, half]

Optionally the mapped keys are put on the target's key shell: RMS-normalised per head and scaled by the target's `k_norm` gain,
which is what a model with QK-norm does to its own keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """One GEMM: source layer `source` times `weight`, added to columns `[to, to + weight.shape[1])` of target layer `target`."""

    source: int
    target: int
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
        self.target_head_dim = parameters.shell_dim
        _check_sources(parameters)
        # By source layer, whose tokens then stay in the CPU's cache for all the target layers that read it.
        products = [p for t in range(parameters.target_layers) for p in self._layer_products(t)]
        self._products = sorted(products, key=lambda p: (p.source, p.target))

    def _layer_products(self, t: int) -> Iterator[_Product]:
        """A source layer that both halves read is multiplied once, for both."""
        rows, width = 2 * self._p.source_width, self._p.target_width
        of_k, of_v = (
            {s: self._weights[t][h][i * rows : (i + 1) * rows] for i, s in enumerate(self._p.sources[t][h])}
            for h in (0, 1)
        )
        for s in sorted(of_k.keys() | of_v.keys()):
            halves = [half[s] for half in (of_k, of_v) if s in half]
            yield _Product(s, t, 0 if s in of_k else width, torch.cat(halves, 1).contiguous())

    def source_layers(self) -> list[int]:
        return sorted({s for layer in self._p.sources for half in layer for s in half})

    def project(self, x: Tensor) -> Tensor:
        n, layers, width = x.shape[0], self._p.target_layers, self._p.target_width
        y = self._biases.reshape(layers, 1, 2 * width).repeat(1, n, 1)
        for p in self._products:
            y[p.target, :, p.to : p.to + p.weight.shape[1]].addmm_(x[:, p.source].flatten(1), p.weight)
        y = y.view(layers, n, 2, width).transpose(0, 1)
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
    positive(p, "source_layers", "source_width", "target_layers", "target_width")
    if p.shell_dim < 0 or (p.shell_dim and p.target_width % p.shell_dim) or not 0 < p.eps < 1:
        raise BundleCorrupt(
            "impossible key shell",
            need=f"a divisor of {p.target_width}, 0 < eps < 1",
            have=f"{p.shell_dim}, eps {p.eps}",
        )
    if len(p.sources) != p.target_layers:
        missing = ", ".join(map(str, range(len(p.sources), p.target_layers)))
        raise BundleCorrupt(
            "sources for other layers than the target has",
            need=f"{p.target_layers} layers",
            have=f"{len(p.sources)}",
            fix=f"Target layers without sources: {missing or 'none'}.",
        )
    for t, halves in enumerate(p.sources):
        if len(halves) != len(_HALVES):
            raise BundleCorrupt(
                f"target layer {t} needs sources for K and for V", need="2 lists", have=f"{len(halves)}"
            )
        for name, layers in zip(_HALVES, halves, strict=True):
            ordered = sorted(set(layers)) == layers
            if not layers or not ordered or layers[0] < 0 or layers[-1] >= p.source_layers:
                raise BundleCorrupt(
                    f"target layer {t} reads impossible source layers for {name}",
                    need=f"ascending layers of 0..{p.source_layers - 1}",
                    have=str(layers),
                )


def positive(p: msgspec.Struct, *fields: str) -> None:
    """Raises BundleCorrupt unless these parameters are at least 1."""
    for field in fields:
        if getattr(p, field) < 1:
            raise BundleCorrupt(
                f"projector parameter {field}", key="manifest.json", need=">= 1", have=str(getattr(p, field))
            )


def typed(parameters: Mapping[str, Any], kind: type[msgspec.Struct]) -> Any:
    """Manifest values as the projector's own struct."""
    try:
        return msgspec.convert(dict(parameters), kind)
    except msgspec.ValidationError as e:
        raise BundleCorrupt(f"projector parameters: {e}", key="manifest.json") from e
