"""Closed-form projector: for each target layer and half, a ridge from a few source layers, in content space.

    capture (or read) KV ─► moments over the training documents ─► greedy layer choice on held-out documents ─► ridge, λ on
    held-out documents ─► values once more with attention-averaged rows ─► LinearProjector

Position 0 stays out: its KV is a function of the first token alone, extreme, and kept native when serving. Nothing here is
judged by its fit; that is `evaluate`'s job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from moonpool.c2c.fitting.capture import CaptureStore
from moonpool.c2c.fitting.gather import Documents as Documents
from moonpool.c2c.fitting.gather import key_gains as key_gains
from moonpool.c2c.fitting.gather import width_of
from moonpool.c2c.fitting.prepare import FitOptions as FitOptions
from moonpool.c2c.fitting.prepare import LayerFit as LayerFit
from moonpool.c2c.fitting.prepare import Prepared, prepare
from moonpool.c2c.fitting.repair import Repair, averaged
from moonpool.c2c.fitting.selection import LayerChooser, Solution, solve
from moonpool.c2c.projectors.linear import LinearParameters, LinearProjector
from moonpool.c2c.signature import ModelSpec


class Fit(msgspec.Struct, frozen=True):
    projector: LinearProjector
    layers: list[LayerFit]
    tokens: int


class _Half(msgspec.Struct, frozen=True):
    """A solved half of a target layer, and the share of averaged rows in it."""

    solution: Solution
    averaged: float = 0.0


def fit_linear(
    source: CaptureStore, target: CaptureStore, documents: Documents, options: FitOptions, console: Console
) -> Fit:
    """Fit. Prints its memory bound first and progress while it runs. Raises ModelError, ConfigError, ConversionError."""
    start = prepare(source, target, documents, options, console)
    tokens = sum(len(d) - 1 for d in documents.train)
    halves = [_solve_layer(start, t) for t in progress(range(target.spec.num_layers), "layers", console)]
    if options.repair_values:
        halves = _repaired(start, halves, console)
    projector = _assemble([[h.solution for h in pair] for pair in halves], source.spec, target.spec, start)
    return Fit(
        projector, [_describe(start, t, h, half) for t, p in enumerate(halves) for h, half in enumerate(p)], tokens
    )


def progress(items: Sequence[Tensor] | range, what: str, console: Console) -> Iterable:  # type: ignore[type-arg]
    return track(items, what, console=console, transient=True)


def candidates(t: int, source_layers: int, target_layers: int, window: int) -> list[int]:
    """Source layers that target layer `t` may read."""
    if not window:
        return list(range(source_layers))
    centre = round(t * (source_layers - 1) / max(1, target_layers - 1))
    last_aligned = t + source_layers - target_layers
    near = {c + d for c in (centre, last_aligned) for d in range(-window, window + 1)}
    return sorted(c for c in near if 0 <= c < source_layers)


def _solve_layer(start: Prepared, t: int) -> list[_Half]:
    source, target, options = start.rows.source.spec, start.rows.target.spec, start.options
    near = candidates(t, source.num_layers, target.num_layers, options.window)
    chooser = LayerChooser(start.moments, start.holdout, near, start.whole)
    found = []
    for half in (0, 1):
        columns = start.columns(t, half)
        at = chooser.choose(columns, options.layers_per_target, start.verdict(t, half))
        found.append(_Half(solve(start.moments, start.holdout, at, columns, options.lambdas)))
    return found


def _repaired(start: Prepared, halves: Sequence[list[_Half]], console: Console) -> list[list[_Half]]:
    """The same keys; values solved again with averaged rows where held-out documents gain by it."""
    options = start.options
    told = start.documents.train[: options.repair_documents]
    read = [pair[1].solution.at for pair in halves]
    rows = averaged(start.rows, told, read, 2 * width_of(start.rows.source.spec), options.queries, console)
    repair = Repair(start.moments, start.holdout, options.lambdas)
    return [
        [keys, _Half(*repair(values.solution, rows[t], start.columns(t, 1), start.judges[t]))]
        for t, (keys, values) in enumerate(halves)
    ]


def _describe(start: Prepared, t: int, half: int, found: _Half) -> LayerFit:
    s, error = found.solution, None
    if start.options.choose == "attention" or start.options.repair_values:
        judge = start.judges[t]
        error = (judge.keys, judge.values)[half](s.predict(start.holdout.x[: judge.rows]))
    return LayerFit(t, "kv"[half], s.at, s.ridge, s.r2, error, found.averaged)


def _assemble(
    solutions: Sequence[Sequence[Solution]], source: ModelSpec, target: ModelSpec, start: Prepared
) -> LinearProjector:
    gains = start.rows.weighting.gains
    parameters = LinearParameters(
        source_layers=source.num_layers,
        source_width=width_of(source),
        target_layers=target.num_layers,
        target_width=width_of(target),
        sources=[[s.at for s in pair] for pair in solutions],
        shell_dim=target.head_dim if gains is not None else 0,
    )
    weights = [[s.weight for s in pair] for pair in solutions]
    biases = torch.stack([torch.stack([s.bias for s in pair]) for pair in solutions])
    return LinearProjector(parameters, weights, biases, gains)
