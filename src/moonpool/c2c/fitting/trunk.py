"""All-layer low-rank projector in closed form: reduced-rank regression of the target's whole KV on the source's.

With G the correlations of x, C their covariance with y and G + λ = L Lᵀ, the best map of rank r is the ridge's solution projected
on the r leading eigenvectors U of Cᵀ (G + λ)⁻¹ C. Each target layer is scaled to the same variance, so that none is drowned, and
values to more than keys: their errors reach the output undamped.

    z = x · (G + λ)⁻¹ C U          y = z · Uᵀ

The values' heads may then be solved again from the latent, with attention-averaged rows (`repair`).
"""

from __future__ import annotations

import msgspec
import torch
from rich.console import Console
from torch import Tensor

from moonpool.c2c.fitting.capture import CaptureStore
from moonpool.c2c.fitting.gather import Documents, Pass, Rows, width_of
from moonpool.c2c.fitting.prepare import FitOptions, LayerFit, Prepared, prepare
from moonpool.c2c.fitting.repair import Repair, averaged
from moonpool.c2c.fitting.ridge import progress
from moonpool.c2c.fitting.selection import Holdout, Solution, cholesky
from moonpool.c2c.projectors.trunk import TrunkParameters, TrunkProjector
from moonpool.errors import ConversionError

LAMBDAS = (1e-4, 1e-3, 1e-2)
"""Fewer than a layer's ridge tries: each costs a factorisation over all source layers."""

_VALUES = 2.0


class TrunkFit(msgspec.Struct, frozen=True):
    projector: TrunkProjector
    layers: list[LayerFit]
    ridge: float


def fit_trunk(
    source: CaptureStore,
    target: CaptureStore,
    documents: Documents,
    options: FitOptions,
    console: Console,
    lambdas: tuple[float, ...] = LAMBDAS,
) -> TrunkFit:
    """Fit a latent of `options.rank` numbers a token. Raises as `fit_linear`."""
    d, e = 2 * width_of(source.spec) * source.spec.num_layers, 2 * width_of(target.spec) * target.spec.num_layers
    start = prepare(source, target, documents, options, console, extra=8 * (3 * d * d + 3 * d * e + 3 * e * e))
    made, ridge = best_trunk(start, lambdas, min(options.rank, d, e), console)
    shares = [0.0] * target.spec.num_layers
    if options.repair_values:
        made, shares = _repaired(start, made, ridge, console)
    every, left = list(start.moments.layers), _residual(start, made).tolist()
    layers = [
        LayerFit(i // 2, "kv"[i % 2], every, ridge, 1 - r, averaged=i % 2 * shares[i // 2]) for i, r in enumerate(left)
    ]
    return TrunkFit(made, layers, ridge)


def best_trunk(
    start: Prepared, lambdas: tuple[float, ...], rank: int, console: Console
) -> tuple[TrunkProjector, float]:
    """The trunk of the λ that leaves least on the held-out rows, and that λ. It reads all columns of the moments as layers."""
    best: tuple[float, float, TrunkProjector] | None = None
    for i in progress(range(len(lambdas)), "ridge terms", console):
        made = _solve(start, lambdas[i], rank)
        left = float(_residual(start, made).mean())
        if best is None or left < best[0]:
            best = (left, lambdas[i], made)
    if best is None:
        raise ConversionError("no ridge term to try", need="at least one λ")
    return best[2], best[1]


class _Latent(Pass):
    """Rows whose x is the latent, `[N, 1, rank]`."""

    def __init__(self, rows: Pass, down: Tensor) -> None:
        super().__init__(rows.source, rows.target, rows.weighting)
        self._down = down

    def document(self, tokens: Tensor) -> Rows:
        x, y, w = super().document(tokens)
        return (x.flatten(1) @ self._down)[:, None], y, w


def _repaired(
    start: Prepared, made: TrunkProjector, ridge: float, console: Console
) -> tuple[TrunkProjector, list[float]]:
    """The values' heads solved again with averaged rows where held-out documents gain by it, and the rows' share per layer."""
    options, tensors = start.options, made.tensors()
    down, up, bias = tensors["down.weight"], tensors["up.weight"].clone(), tensors["bias"].clone()
    told, layers = start.documents.train[: options.repair_documents], len(bias)
    rows = averaged(_Latent(start.rows, down), told, [[0]] * layers, down.shape[1], options.queries, console)
    held = Holdout((start.holdout.x.flatten(1) @ down)[:, None], start.holdout.y, start.holdout.weight)
    repair = Repair(start.moments.through(down.to(torch.float64)), held, options.lambdas)
    shares = []
    for t in range(layers):
        columns = start.columns(t, 1)
        plain = Solution([0], up[:, columns].clone(), bias[t, 1].clone(), ridge, 0.0)
        found, share = repair(plain, rows[t], columns, start.judges[t])
        up[:, columns], bias[t, 1] = found.weight, found.bias
        shares.append(share)
    parameters = msgspec.convert(made.parameters(), TrunkParameters)
    return TrunkProjector(parameters, down, up, bias, start.rows.weighting.gains), shares


def _solve(start: Prepared, ridge: float, rank: int) -> TrunkProjector:
    m, source, target, gains = start.moments, start.rows.source.spec, start.rows.target.spec, start.rows.weighting.gains
    every, columns = range(len(m.layers)), slice(0, m.xy.shape[1])
    deviation, scale = m.deviation(every), _scale(start)
    factor = m.correlation()
    factor.diagonal().add_(ridge)
    factor = cholesky(factor, ridge, upper=True)
    white = m.cross(every, columns).div_(deviation[:, None]).div_(scale)
    white = torch.linalg.solve_triangular(factor.T, white, upper=False)
    leading = torch.linalg.eigh(white.T @ white).eigenvectors[:, -rank:]
    down = torch.linalg.solve_triangular(factor, white @ leading, upper=True) / deviation[:, None]
    up = leading.T * scale
    bias = m.mean_y(columns) - (m.mean_x(every) @ down) @ up
    parameters = TrunkParameters(
        source_layers=len(m.layers),
        source_width=width_of(source),
        target_layers=target.num_layers,
        target_width=width_of(target),
        rank=rank,
        shell_dim=target.head_dim if gains is not None else 0,
    )
    shape = (target.num_layers, 2, width_of(target))
    return TrunkProjector(
        parameters, down.float().contiguous(), up.float().contiguous(), bias.float().view(shape), gains
    )


def _scale(start: Prepared) -> Tensor:
    """fp64 `[E]`: the deviation of the half of the target layer that each column belongs to, values' by `_VALUES` less."""
    width, m = width_of(start.rows.target.spec), start.moments
    each = m.variance_y(slice(0, m.xy.shape[1])).view(-1, 2, width).mean(2).clamp(min=1e-12).sqrt()
    each[:, 1] /= _VALUES
    return each.flatten().repeat_interleave(width)


def _residual(start: Prepared, made: TrunkProjector) -> Tensor:
    """Held-out squares that are left, before the key shell, over those around the training mean: `[target layers * 2]`."""
    width, h = width_of(start.rows.target.spec), start.holdout
    tensors = made.tensors()
    found = torch.addmm(tensors["bias"].flatten(), h.x.flatten(1) @ tensors["down.weight"], tensors["up.weight"])
    mean = start.moments.mean_y(slice(0, h.y.shape[1])).float()
    left, all_ = (((h.y - t).square() * h.weight[:, None]).sum(0).view(-1, width).sum(1) for t in (found, mean))
    return left / all_.clamp(min=1e-12)
