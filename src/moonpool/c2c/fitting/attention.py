"""What a wrong key or value costs where it is used: the error of the target's attention output.

For held-out documents the target's own queries are at hand. Mapped keys are judged with native values and mapped values with
native keys, so that each half's layers are chosen for themselves:

    K:  softmax(q · K̂) V  against  softmax(q · K) V            V:  softmax(q · K) V̂  against  softmax(q · K) V

A residual of the keys counts only as far as it moves a softmax, one of the values only as far as somebody looks there; R² sees
neither. Position 0 is native on both sides, as it is when serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moonpool.c2c.fitting.capture import CaptureStore
from moonpool.c2c.rope import rotate
from moonpool.c2c.signature import ModelSpec

_EPS = 1e-6


def asked_at(length: int, count: int) -> Tensor:
    """Positions of up to `count` queries, evenly over the last three quarters of a document."""
    return torch.linspace(length // 4, length - 1, min(count, length - length // 4)).round().long()


def attention(q: Tensor, k: Tensor, at: Tensor) -> Tensor:
    """Probabilities `[KV heads, group, n, N]` of queries `[n, heads, dim]` at positions `at` over keys `[N, KV heads, dim]`,
    both rotated."""
    grouped = q.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
    scores = grouped @ k.permute(1, 2, 0)[:, None] * k.shape[-1] ** -0.5
    later = torch.arange(len(k)) > at[:, None]
    return scores.masked_fill_(later, float("-inf")).softmax(-1)


@dataclass(frozen=True)
class Asked:
    """One document in one target layer: queries `[n, heads, dim]` at positions `at`, keys and values `[N, KV heads, dim]`,
    fp32; queries and keys rotated."""

    q: Tensor
    at: Tensor
    k: Tensor
    v: Tensor

    @cached_property
    def native(self) -> Tensor:
        """Native probabilities."""
        return attention(self.q, self.k, self.at)

    @cached_property
    def output(self) -> Tensor:
        """Native outputs `[KV heads, group, n, dim]`."""
        return self.of_values(self.v)

    def of_values(self, v: Tensor) -> Tensor:
        return self.native @ v.permute(1, 0, 2)[:, None]

    def of(self, k: Tensor, v: Tensor) -> Tensor:
        return attention(self.q, k, self.at) @ v.permute(1, 0, 2)[:, None]

    def head(self, h: int) -> Asked:
        """KV head `h` alone, with the queries that read it."""
        one = slice(h, h + 1)
        return Asked(self.q.unflatten(1, (self.k.shape[1], -1))[:, h], self.at, self.k[:, one], self.v[:, one])


def asked(target: CaptureStore, tokens: Tensor, layers: Sequence[int], count: int) -> list[Asked]:
    """The document in each of these target layers, with up to `count` queries."""
    spec, at, kv = target.spec, asked_at(len(tokens), count), target.get(tokens)
    q = rotate(target.queries(tokens, at)[:, list(layers)].float(), at, spec.rope)
    return [Asked(q[:, i], at, kv.k[:, t].float(), kv.v[:, t].float()) for i, t in enumerate(layers)]


class Judge:
    """Scores mapped keys or values of one target layer on some documents; less is better.

    `rows` are the layer's mapped keys (content space, before the key shell) or values in those documents, in order and without
    position 0: fp32 `[Σ (N - 1), heads * dim]`. A score is the outputs' squared error over their squared size.
    """

    def __init__(self, documents: Sequence[Asked], spec: ModelSpec, gains: Tensor | None = None) -> None:
        """`gains`: the layer's `k_norm` gains `[dim]` where keys go onto the target's shell."""
        self._documents, self._spec, self._gains = documents, spec, gains
        self.rows = sum(len(d.k) - 1 for d in documents)

    def keys(self, rows: Tensor) -> float:
        return self._error([(d, d.of(k, d.v)) for d, k in zip(self._documents, self._whole_keys(rows), strict=True)])

    def values(self, rows: Tensor) -> float:
        found = zip(self._documents, self._whole_values(rows), strict=True)
        return self._error([(d, d.of_values(v)) for d, v in found])

    def both(self, keys: Tensor, values: Tensor) -> float:
        """Of mapped keys and mapped values together."""
        found = zip(self._documents, self._whole_keys(keys), self._whole_values(values), strict=True)
        return self._error([(d, d.of(k, v)) for d, k, v in found])

    def head(self, h: int) -> Judge:
        return Judge([d.head(h) for d in self._documents], self._spec, self._gains)

    def _whole_keys(self, rows: Tensor) -> list[Tensor]:
        """Each document's keys as attention reads them, `[N, KV heads, dim]`."""
        heads = rows.unflatten(1, (-1, self._spec.head_dim))
        if self._gains is not None:
            heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + _EPS) * self._gains
        return [
            torch.cat([d.k[:1], self._rotated(k)]) for d, k in zip(self._documents, self._split(heads), strict=True)
        ]

    def _whole_values(self, rows: Tensor) -> list[Tensor]:
        heads = self._split(rows.unflatten(1, (-1, self._spec.head_dim)))
        return [torch.cat([d.v[:1], v]) for d, v in zip(self._documents, heads, strict=True)]

    def _split(self, rows: Tensor) -> Sequence[Tensor]:
        return rows.split([len(d.k) - 1 for d in self._documents])

    def _rotated(self, k: Tensor) -> Tensor:
        return rotate(k[:, None].contiguous(), torch.arange(1, len(k) + 1), self._spec.rope)[:, 0]

    @staticmethod
    def _error(found: Sequence[tuple[Asked, Tensor]]) -> float:
        wrong = sum(float((o - d.output).square().sum()) for d, o in found)
        return wrong / max(1e-12, sum(float(d.output.square().sum()) for d, _ in found))


class Judges:
    """The judge of each target layer, over the same documents, whose queries stay in memory (bf16 on disk, fp32 per layer)."""

    def __init__(self, target: CaptureStore, documents: Sequence[Tensor], count: int, gains: Tensor | None) -> None:
        layers = range(target.spec.num_layers)
        found = [asked(target, d, layers, count) for d in documents]
        self._judges = [
            Judge([document[t] for document in found], target.spec, gains[t] if gains is not None else None)
            for t in layers
        ]

    def __getitem__(self, layer: int) -> Judge:
        return self._judges[layer]
