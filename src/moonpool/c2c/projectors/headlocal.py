"""`headlocal`: KV head h of the target from KV head h of a few source layers (c2c-design §2, HL-k).

    y[t, half, h] = Σ over the layers s of S(t, half, h):  x[s, :, h] · W[t, half, h, s]  + b[t, half, h]

The same as `linear` with zeros between heads, at 1/heads of its cost, and a tensor-parallel rank that holds some heads of both
models converts them alone. Both models have equally many KV heads; head_dim may differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import msgspec
import torch
from torch import Tensor

from moonpool.c2c.projectors.base import KeySpace, Projector, take
from moonpool.c2c.projectors.linear import positive, typed
from moonpool.c2c.projectors.shell import check_shell, onto_shell
from moonpool.errors import BundleCorrupt

_HALVES = ("k", "v")


class HeadLocalParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source_layers: int
    source_width: int
    target_layers: int
    target_width: int
    heads: int
    sources: list[list[list[list[int]]]]
    """`[target layer][half][head]` → ascending source layers, equally many for each head."""
    key_space: KeySpace = "content"
    shell_dim: int = 0
    """head_dim of the target where keys are put on its shell, else 0."""
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class _Product:
    """One GEMM: head `head` of source layer `source` into columns from `to` of that head in target layer `target`."""

    source: int
    head: int
    target: int
    to: int
    weight: Tensor


class HeadLocalProjector(Projector):
    kind: ClassVar[str] = "headlocal"

    def __init__(
        self,
        parameters: HeadLocalParameters,
        weights: Sequence[Sequence[Tensor]],
        biases: Tensor,
        shell: Tensor | None = None,
    ) -> None:
        """`weights[t][half]`: fp32 `[heads, len(S) * 2 * source dim, target dim]`, rows in the order of S(t, half, head), K before
        V in each layer. `biases`: `[target layers, 2, target width]`. `shell`: `[target layers, shell_dim]`."""
        p = self._p = parameters
        self._weights, self._biases, self._shell = weights, biases, shell
        self.key_space = p.key_space
        self.source_shape = (p.source_layers, p.source_width)
        self.target_shape = (p.target_layers, p.target_width)
        self.target_head_dim = p.target_width // p.heads
        products = [m for t in range(p.target_layers) for h in range(p.heads) for m in self._head_products(t, h)]
        self._products = sorted(products, key=lambda m: (m.source, m.head, m.target))

    def _head_products(self, t: int, h: int) -> Iterator[_Product]:
        """A source head that both halves read is multiplied once, for both."""
        rows, dim = 2 * self._p.source_width // self._p.heads, self._p.target_width // self._p.heads
        of_k, of_v = (
            {s: self._weights[t][half][h, i * rows : (i + 1) * rows] for i, s in enumerate(self._p.sources[t][half][h])}
            for half in (0, 1)
        )
        for s in sorted(of_k.keys() | of_v.keys()):
            halves = [half[s] for half in (of_k, of_v) if s in half]
            yield _Product(s, h, t, 0 if s in of_k else dim, torch.cat(halves, 1).contiguous())

    def source_layers(self) -> list[int]:
        return sorted({p.source for p in self._products})

    def project(self, x: Tensor) -> Tensor:
        p, n = self._p, len(x)
        dim = p.target_width // p.heads
        by_head = {s: self._heads(x[:, s]) for s in self.source_layers()}
        biases = (
            self._biases.unflatten(-1, (p.heads, dim)).transpose(1, 2).reshape(p.target_layers, p.heads, 1, 2 * dim)
        )
        y = biases.repeat(1, 1, n, 1)
        for m in self._products:
            y[m.target, m.head, :, m.to : m.to + m.weight.shape[1]].addmm_(by_head[m.source][m.head], m.weight)
        y = y.unflatten(-1, (2, dim)).permute(2, 0, 3, 1, 4).reshape(n, p.target_layers, 2, p.target_width)
        if self._shell is not None:
            onto_shell(y[:, :, 0], self._shell, p.eps)
        return y

    def _heads(self, x: Tensor) -> Tensor:
        """`[N, 2, width]` → `[heads, N, 2 * dim]`, contiguous."""
        return x.unflatten(-1, (self._p.heads, -1)).permute(2, 0, 1, 3).flatten(2)

    def flops_per_token(self) -> int:
        return sum(2 * p.weight.numel() for p in self._products)

    def parameters(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(self._p))

    def tensors(self) -> dict[str, Tensor]:
        named = ((t, name, w) for t, pair in enumerate(self._weights) for name, w in zip(_HALVES, pair, strict=True))
        found = {f"layers.{t}.{name}.weight": w for t, name, w in named} | {"bias": self._biases}
        return found if self._shell is None else {**found, "shell": self._shell}

    @classmethod
    def build(cls, parameters: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        p: HeadLocalParameters = typed(parameters, HeadLocalParameters)
        _check(p)
        rows, dim = 2 * p.source_width // p.heads, p.target_width // p.heads
        weights = [
            [
                take(tensors, f"layers.{t}.{name}.weight", (p.heads, len(half[0]) * rows, dim))
                for name, half in zip(_HALVES, p.sources[t], strict=True)
            ]
            for t in range(p.target_layers)
        ]
        shell = take(tensors, "shell", (p.target_layers, p.shell_dim)) if p.shell_dim else None
        return cls(p, weights, take(tensors, "bias", (p.target_layers, 2, p.target_width)), shell)


def _check(p: HeadLocalParameters) -> None:
    """Raises BundleCorrupt unless every head of every half of every layer has sources that exist."""
    positive(p, "source_layers", "source_width", "target_layers", "target_width", "heads")
    check_shell(p.shell_dim, p.target_width, p.eps)
    if p.source_width % p.heads or p.target_width % p.heads or p.shell_dim not in (0, p.target_width // p.heads):
        raise BundleCorrupt(
            "widths do not divide into heads", need=f"{p.heads} heads", have=f"{p.source_width}, {p.target_width}"
        )
    if len(p.sources) != p.target_layers or any(len(halves) != len(_HALVES) for halves in p.sources):
        raise BundleCorrupt("sources for K and V of each target layer are needed", need=f"{p.target_layers} pairs")
    for t, halves in enumerate(p.sources):
        for name, heads in zip(_HALVES, halves, strict=True):
            whole = len(heads) == p.heads and len({len(layers) for layers in heads}) == 1 and bool(heads[0])
            if not whole or not all(sorted(set(s)) == s and s[0] >= 0 and s[-1] < p.source_layers for s in heads):
                need = f"as many ascending layers of 0..{p.source_layers - 1} for each of {p.heads} heads"
                raise BundleCorrupt(
                    f"target layer {t} reads impossible source layers for {name}", need=need, have=str(heads)
                )
