"""Head-local projector in closed form: each KV head of the target from the same head of a few source layers.

Every head is a fit of its own, with its own source layers, on its part of the moments: a pair of models where head h means
head h (one family, grown or shrunk in depth) gets the full-head map's quality at 1/heads of its cost.
"""

from __future__ import annotations

import msgspec
import torch
from rich.console import Console
from torch import Tensor

from moonpool.c2c.fitting.capture import CaptureStore
from moonpool.c2c.fitting.gather import Documents, width_of
from moonpool.c2c.fitting.prepare import FitOptions, LayerFit, Prepared, prepare
from moonpool.c2c.fitting.ridge import candidates, progress
from moonpool.c2c.fitting.selection import LayerChooser, Solution, solve
from moonpool.c2c.projectors.headlocal import HeadLocalParameters, HeadLocalProjector
from moonpool.errors import ConversionRefused


class HeadLocalFit(msgspec.Struct, frozen=True):
    projector: HeadLocalProjector
    layers: list[LayerFit]


def fit_head_local(
    source: CaptureStore, target: CaptureStore, documents: Documents, options: FitOptions, console: Console
) -> HeadLocalFit:
    """Fit. Raises ConversionRefused where KV-head counts differ, else as `fit_linear`."""
    heads, theirs = target.spec.num_kv_heads, source.spec.num_kv_heads
    if heads != theirs:
        raise ConversionRefused(
            "a head-local map needs equal KV-head counts",
            need=f"{heads} heads",
            have=f"{theirs} in {source.spec.name}",
            fix="Fit the full variant.",
        )
    start = prepare(source, target, documents, options, console)
    layers = target.spec.num_layers
    found: list[list[list[Solution]]] = [[[], []] for _ in range(layers)]
    for h in progress(range(heads), "heads", console):
        for t, halves in enumerate(_solve_head(start, h)):
            for half, solution in enumerate(halves):
                found[t][half].append(solution)
    described = [
        LayerFit(t, "kv"[half], s.at, s.ridge, s.r2, head=h)
        for t, pair in enumerate(found)
        for half, of_heads in enumerate(pair)
        for h, s in enumerate(of_heads)
    ]
    return HeadLocalFit(_assemble(found, start), described)


def _solve_head(start: Prepared, h: int) -> list[list[Solution]]:
    """`[target layer][half]` of one head."""
    source, target, options = start.rows.source.spec, start.rows.target.spec, start.options
    x, y = (
        _columns(source.head_dim, width_of(source), 1, h),
        _columns(target.head_dim, width_of(target), target.num_layers, h),
    )
    moments = start.moments.part(range(source.num_layers), x, y)
    holdout = start.holdout.of_columns(x, y)
    found = []
    for t in range(target.num_layers):
        near = candidates(t, source.num_layers, target.num_layers, options.window)
        chooser = LayerChooser(moments, holdout, near, start.whole)
        halves = []
        for half in (0, 1):
            columns = slice((2 * t + half) * target.head_dim, (2 * t + half + 1) * target.head_dim)
            at = chooser.choose(columns, options.layers_per_target, start.verdict(t, half, h))
            halves.append(solve(moments, holdout, at, columns, options.lambdas))
        found.append(halves)
    return found


def _columns(dim: int, width: int, layers: int, h: int) -> Tensor:
    """Columns of head `h` in K and V of each of `layers` layers."""
    return (torch.arange(2 * layers)[:, None] * width + h * dim + torch.arange(dim)).flatten()


def _assemble(found: list[list[list[Solution]]], start: Prepared) -> HeadLocalProjector:
    source, target, gains = start.rows.source.spec, start.rows.target.spec, start.rows.weighting.gains
    parameters = HeadLocalParameters(
        source_layers=source.num_layers,
        source_width=width_of(source),
        target_layers=target.num_layers,
        target_width=width_of(target),
        heads=target.num_kv_heads,
        sources=[[[s.at for s in half] for half in pair] for pair in found],
        shell_dim=target.head_dim if gains is not None else 0,
    )
    weights = [[torch.stack([s.weight for s in half]) for half in pair] for pair in found]
    biases = torch.stack([torch.stack([torch.cat([s.bias for s in half]) for half in pair]) for pair in found])
    return HeadLocalProjector(parameters, weights, biases, gains)
