"""Which source layers a target layer reads, and the ridge that reads them.

Layers are picked greedily: at each step the layer whose addition leaves the least residual on *held-out* rows. Refitting for
every candidate would cost a factorisation each; instead the candidates are kept orthogonal to what was picked already (block
Gram-Schmidt on the regularised Gram matrix), so a step costs one small factorisation per candidate and gives exactly the
residual that a full refit would give.

Features are standardised, so the ridge term is relative: λ = 1e-3 means a thousandth of every feature's own variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moonpool.c2c.fitting.moments import Moments
from moonpool.errors import ConversionError

LAMBDAS = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
_SELECTION_RIDGE = 1e-3
_HOLDOUT_ROWS = 1536
"""Rows that judge a choice of layers (each candidate is applied to all of them)."""


@dataclass(frozen=True, slots=True)
class Holdout:
    """Rows that the moments have not seen: `x` fp32 `[n, layers, layer_width]`, `y` fp32 `[n, E]`, `weight` fp32 `[n]`."""

    x: Tensor
    y: Tensor
    weight: Tensor


@dataclass(frozen=True, slots=True)
class Solution:
    """An affine map of some layers: `y = x[at] · weight + bias`, on raw features."""

    at: list[int]
    """Places in `Moments.layers`, ascending."""
    weight: Tensor
    bias: Tensor
    ridge: float
    r2: float
    """Share of the held-out (weighted) squares around the training mean that is explained, all columns together."""


@dataclass(slots=True)
class _Candidate:
    """A layer, orthogonal to the picked ones: its Gram block, its covariance with y, its held-out rows."""

    gram: Tensor
    cross: Tensor
    rows: Tensor
    overlaps: list[Tensor]
    """One per picked layer: whitened covariance of that layer with this one."""


class LayerChooser:
    """Candidates of one target layer; `choose` may be asked for each half."""

    def __init__(self, moments: Moments, holdout: Holdout, candidates: Sequence[int]) -> None:
        """`candidates`: places in `moments.layers`."""
        self._m, self._candidates = moments, list(candidates)
        deviation, mean = moments.deviation(candidates), moments.mean_x(candidates)
        width = moments.layer_width
        self._deviation = deviation.view(-1, width)
        covariance = moments.covariance(candidates, candidates) / torch.outer(deviation, deviation)
        count = len(candidates)
        self._blocks = covariance.to(torch.float32).view(count, width, count, width).permute(0, 2, 1, 3)
        step = max(1, len(holdout.x) // _HOLDOUT_ROWS)
        rows = holdout.x[::step, list(candidates)].flatten(1)
        self._root = holdout.weight[::step, None].sqrt()
        self._rows = ((rows - mean.float()) / deviation.float() * self._root).view(len(rows), count, width)
        self._y = holdout.y[::step]

    def choose(self, columns: slice, count: int) -> list[int]:
        """Up to `count` places in the order in which they were picked."""
        residual = (self._y[:, columns] - self._m.mean_y(columns).float()) * self._root
        open_ = {i: self._fresh(i, columns) for i in range(len(self._candidates))}
        picked: list[int] = []
        while open_ and len(picked) < count:
            best, left = min(((i, _left(residual, c)) for i, c in open_.items()), key=lambda found: float(found[1][1]))
            residual = left[0]
            self._orthogonalise(open_, best, open_.pop(best))
            picked.append(best)
        return [self._candidates[i] for i in picked]

    def _fresh(self, i: int, columns: slice) -> _Candidate:
        cross = self._m.cross([self._candidates[i]], columns) / self._deviation[i][:, None]
        gram = self._blocks[i, i].clone()
        gram.diagonal().add_(_SELECTION_RIDGE)
        return _Candidate(gram, cross.float(), self._rows[:, i], [])

    def _orthogonalise(self, open_: dict[int, _Candidate], s: int, picked: _Candidate) -> None:
        factor = torch.linalg.cholesky(picked.gram)
        cross = torch.linalg.solve_triangular(factor, picked.cross, upper=False)
        rows = torch.linalg.solve_triangular(factor, picked.rows.T, upper=False).T
        for i, c in open_.items():
            overlap = self._blocks[s, i].clone()
            for a, b in zip(picked.overlaps, c.overlaps, strict=True):
                overlap.addmm_(a.T, b, alpha=-1)
            overlap = torch.linalg.solve_triangular(factor, overlap, upper=False)
            c.gram.addmm_(overlap.T, overlap, alpha=-1)
            c.cross.addmm_(overlap.T, cross, alpha=-1)
            c.rows = c.rows - rows @ overlap
            c.overlaps.append(overlap)


def _left(residual: Tensor, c: _Candidate) -> tuple[Tensor, Tensor]:
    """(held-out residual after adding this layer, its squared sum)."""
    weight = torch.cholesky_solve(c.cross, torch.linalg.cholesky(c.gram))
    left = residual - c.rows @ weight
    return left, left.square().sum()


def solve(
    moments: Moments, holdout: Holdout, at: Sequence[int], columns: slice, lambdas: Sequence[float] = LAMBDAS
) -> Solution:
    """The ridge from the layers at places `at`, with the λ that leaves the least held-out residual, in fp64."""
    at = sorted(at)
    deviation, mean_x, mean_y = moments.deviation(at), moments.mean_x(at), moments.mean_y(columns)
    gram = moments.covariance(at, at) / torch.outer(deviation, deviation)
    cross = moments.cross(at, columns) / deviation[:, None]
    x = ((holdout.x[:, at].flatten(1) - mean_x.float()) / deviation.float()).to(torch.float32)
    root = holdout.weight[:, None].sqrt()
    x *= root
    y = (holdout.y[:, columns] - mean_y.float()) * root
    best: tuple[float, float, Tensor] | None = None
    for ridge in lambdas:
        weight = ridge_weights(gram, cross, ridge)
        left = float((y - x @ weight.float()).square().sum())
        if best is None or left < best[0]:
            best = (left, ridge, weight)
    if best is None:
        raise ConversionError("no ridge term to try", need="at least one λ")
    raw = best[2] / deviation[:, None]
    total = float(y.square().sum())
    return Solution(at, raw.float(), (mean_y - mean_x @ raw).float(), best[1], 1 - best[0] / max(total, 1e-12))


def ridge_weights(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """`(gram + ridge·1)⁻¹ cross`. Raises ConversionError if the matrix is not positive definite (too few rows, λ too small)."""
    regular = gram.clone()
    regular.diagonal().add_(ridge)
    factor, failed = torch.linalg.cholesky_ex(regular)
    if int(failed):
        raise ConversionError(
            "the ridge's matrix is not positive definite", have=f"λ = {ridge:g}", fix="Use more tokens or a larger λ."
        )
    return torch.cholesky_solve(cross, factor)
