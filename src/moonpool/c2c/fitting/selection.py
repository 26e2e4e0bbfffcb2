"""Which source layers a target layer reads, and the ridge that reads them.

Layers are picked greedily: at each step the layer whose addition leaves the least residual on *held-out* rows, or, of the few
best by that, the one that a judge likes most. Refitting for every candidate would cost a factorisation each; instead the
candidates are kept orthogonal to what was picked already (block Gram-Schmidt on the regularised Gram matrix), so a step costs
one small factorisation per candidate and gives exactly the residual that a full refit would give.

Features are standardised, so the ridge term is relative: λ = 1e-3 means a thousandth of every feature's own variance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def of_columns(self, x: Tensor, y: Tensor) -> Holdout:
        """These columns (indices) of each source layer and of the target."""
        return Holdout(self.x[:, :, x], self.y[:, y], self.weight)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Decides among the `few` candidates that are best by their residual: `score` of what they predict for the first `rows`
    held-out rows, less is better."""

    score: Callable[[Tensor], float]
    rows: int
    few: int = 3


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

    def predict(self, x: Tensor) -> Tensor:
        """fp32 `[n, columns]` for rows `[n, layers, layer_width]`."""
        return torch.addmm(self.bias, x[:, self.at].flatten(1), self.weight)


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

    def __init__(self, moments: Moments, holdout: Holdout, candidates: Sequence[int], whole: int = 0) -> None:
        """`candidates`: places in `moments.layers`. `whole`: residuals are those of the first so many held-out rows, each
        counted once, as a `Verdict` needs them; else of a sample of all of them."""
        self._m, self._candidates = moments, list(candidates)
        step = max(1, len(holdout.x) // _HOLDOUT_ROWS)
        judged = slice(0, whole) if whole else slice(None, None, step)
        deviation, mean = moments.deviation(candidates), moments.mean_x(candidates)
        self._deviation = deviation.view(-1, moments.layer_width)
        self._root = torch.ones(whole, 1) if whole else holdout.weight[judged, None].sqrt()
        rows = (holdout.x[judged, self._candidates].flatten(1) - mean.float()).div_(deviation.float()).mul_(self._root)
        self._rows = rows.view(len(rows), len(self._candidates), moments.layer_width)
        self._y = holdout.y[judged]

    def choose(self, columns: slice, count: int, verdict: Verdict | None = None) -> list[int]:
        """Up to `count` places in the order in which they were picked."""
        residual = (self._y[:, columns] - self._m.mean_y(columns).float()) * self._root
        open_ = {i: self._fresh(i, columns) for i in range(len(self._candidates))}
        picked: list[int] = []
        while open_ and len(picked) < count:
            best, residual = self._best({i: _left(residual, c) for i, c in open_.items()}, columns, verdict)
            self._orthogonalise(open_, best, open_.pop(best))
            picked.append(best)
        return [self._candidates[i] for i in picked]

    def _best(self, left: dict[int, Tensor], columns: slice, verdict: Verdict | None) -> tuple[int, Tensor]:
        order = sorted(left, key=lambda i: float(left[i].square().sum()))
        if verdict is None:
            return order[0], left[order[0]]
        y = self._y[:, columns]
        best = min(order[: verdict.few], key=lambda i: verdict.score(y - left[i]))
        return best, left[best]

    def _block(self, i: int, j: int) -> Tensor:
        """Correlations of two candidates' columns, fp32."""
        raw = self._m.covariance([self._candidates[i]], [self._candidates[j]])
        return (raw / torch.outer(self._deviation[i], self._deviation[j])).float()

    def _fresh(self, i: int, columns: slice) -> _Candidate:
        cross = self._m.cross([self._candidates[i]], columns) / self._deviation[i][:, None]
        gram = self._block(i, i)
        gram.diagonal().add_(_SELECTION_RIDGE)
        return _Candidate(gram, cross.float(), self._rows[:, i], [])

    def _orthogonalise(self, open_: dict[int, _Candidate], s: int, picked: _Candidate) -> None:
        factor = torch.linalg.cholesky(picked.gram)
        cross = torch.linalg.solve_triangular(factor, picked.cross, upper=False)
        rows = torch.linalg.solve_triangular(factor, picked.rows.T, upper=False).T
        for i, c in open_.items():
            overlap = self._block(s, i)
            for a, b in zip(picked.overlaps, c.overlaps, strict=True):
                overlap.addmm_(a.T, b, alpha=-1)
            overlap = torch.linalg.solve_triangular(factor, overlap, upper=False)
            c.gram.addmm_(overlap.T, overlap, alpha=-1)
            c.cross.addmm_(overlap.T, cross, alpha=-1)
            c.rows = c.rows - rows @ overlap
            c.overlaps.append(overlap)


def _left(residual: Tensor, c: _Candidate) -> Tensor:
    """Held-out residual after adding this layer."""
    return residual - c.rows @ torch.cholesky_solve(c.cross, torch.linalg.cholesky(c.gram))


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
    return torch.cholesky_solve(cross, cholesky(regular, ridge))


def cholesky(regular: Tensor, ridge: float, *, upper: bool = False) -> Tensor:
    """The factor; only the triangle that is asked for is read. Raises ConversionError."""
    factor, failed = torch.linalg.cholesky_ex(regular, upper=upper)
    if int(failed):
        raise ConversionError(
            "the ridge's matrix is not positive definite", have=f"λ = {ridge:g}", fix="Use more tokens or a larger λ."
        )
    return factor
