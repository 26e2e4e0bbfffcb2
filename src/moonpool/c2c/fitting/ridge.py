"""Closed-form projector: for each target layer and half, a ridge from a few source layers, in content space.

    capture (or read) KV ─► moments over the training documents ─► greedy layer choice on held-out documents ─► ridge, λ on
    held-out documents ─► LinearProjector

Position 0 stays out: its KV is a function of the first token alone, extreme, and kept native when serving. Nothing here is
judged by its fit; that is `evaluate`'s job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.progress import track
from safetensors import safe_open
from torch import Tensor

from moonpool.c2c.fitting.capture import CaptureStore
from moonpool.c2c.fitting.features import rows
from moonpool.c2c.fitting.moments import Moments
from moonpool.c2c.fitting.selection import LAMBDAS, Holdout, LayerChooser, Solution, solve
from moonpool.c2c.projectors.linear import LinearParameters, LinearProjector
from moonpool.c2c.signature import ModelSpec
from moonpool.errors import ModelError

_ROWS_AT_ONCE = 2048
_MOST = 30.0


class FitOptions(msgspec.Struct, frozen=True, kw_only=True):
    layers_per_target: int = 4
    """Source layers that each half of a target layer reads."""
    window: int = 6
    """Candidates: source layers within ± this of the depth-normalised and of the last-aligned index; 0 = all layers."""
    shell: bool = False
    """Put mapped keys on the target's key shell (targets with QK-norm only)."""
    attention: float = 0.0
    """Rows count by the attention that their token gets in the target: weight `1 - a + a · mass / mean mass`, at most
    `_MOST` (CacheBridge's idea: an error in a token that nobody looks at is harmless)."""
    lambdas: tuple[float, ...] = LAMBDAS


class LayerFit(msgspec.Struct, frozen=True):
    """How one half of one target layer is read."""

    target_layer: int
    half: str
    source_layers: list[int]
    ridge: float
    r2: float


class Fit(msgspec.Struct, frozen=True):
    projector: LinearProjector
    layers: list[LayerFit]
    tokens: int


class Documents(msgspec.Struct, frozen=True):
    """Documents (`[N]` token ids each) for the moments, and others for choosing layers and λ."""

    train: list[Tensor]
    choose: list[Tensor]


def fit_linear(
    source: CaptureStore, target: CaptureStore, documents: Documents, options: FitOptions, console: Console
) -> Fit:
    """Fit. Prints its memory bound first and progress while it runs. Raises ModelError, ConversionError."""
    layers = range(source.spec.num_layers)
    layer_width, width = 2 * _width(source.spec), 2 * _width(target.spec) * target.spec.num_layers
    need = Moments.bytes_needed(len(layers), layer_width, width)
    console.print(f"moments: {need / 1e9:.2f} GB, and as much again at most while solving")
    gains = key_gains(target) if options.shell else None
    moments = Moments(layers, layer_width, width)
    for x, y, w in _batches(_weighted(source, target, _progress(documents.train, "moments", console), options, gains)):
        moments.add(x.flatten(1), y.flatten(1), w)
    held = list(_weighted(source, target, documents.choose, options, gains))
    x, y, w = (torch.cat(parts) for parts in zip(*held, strict=True))
    holdout = Holdout(x.flatten(2), y.flatten(1), w)
    solutions = [
        _fit_layer(moments, holdout, t, source.spec, target.spec, options)
        for t in _progress(range(target.spec.num_layers), "layers", console)
    ]
    projector = _assemble(solutions, source.spec, target.spec, gains)
    return Fit(
        projector, [_describe(t, h, s) for t, p in enumerate(solutions) for h, s in enumerate(p)], int(moments.weight)
    )


def _progress(items: Sequence[Tensor] | range, what: str, console: Console) -> Iterable:  # type: ignore[type-arg]
    return track(items, what, console=console, transient=True)


def _width(spec: ModelSpec) -> int:
    return spec.num_kv_heads * spec.head_dim


def pairs(
    source: CaptureStore, target: CaptureStore, documents: Iterable[Tensor], gains: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """(x, y) of each document but for position 0: fp32 `[N - 1, layers, 2, width]`, keys un-rotated, target keys over `gains`."""
    for tokens in documents:
        x = rows(source.get(tokens), source.spec.rope)[1:]
        y = rows(target.get(tokens), target.spec.rope)[1:]
        if gains is not None:
            y[:, :, 0] /= gains.repeat(1, target.spec.num_kv_heads)
        yield x, y


Rows = tuple[Tensor, Tensor, Tensor]


def _weighted(
    source: CaptureStore, target: CaptureStore, documents: Iterable[Tensor], options: FitOptions, gains: Tensor | None
) -> Iterator[Rows]:
    """`pairs` with each row's weight."""
    for tokens in documents:
        x, y = next(pairs(source, target, [tokens], gains))
        weight = torch.ones(len(x))
        if options.attention:
            mass = target.attention_mass(tokens)[:, 1:].mean(0)
            weight = (1 - options.attention + options.attention * mass / mass.mean()).clamp(max=_MOST)
        yield x, y, weight


def _batches(found: Iterator[Rows]) -> Iterator[Rows]:
    """Documents put together: the accumulators are then walked through less often."""
    held: list[Rows] = []
    for rows_ in found:
        held.append(rows_)
        if sum(len(x) for x, _, _ in held) >= _ROWS_AT_ONCE:
            yield _joined(held)
            held = []
    if held:
        yield _joined(held)


def _joined(parts: list[Rows]) -> Rows:
    x, y, w = (torch.cat(p) for p in zip(*parts, strict=True))
    return x, y, w


def candidates(t: int, source_layers: int, target_layers: int, window: int) -> list[int]:
    """Source layers that target layer `t` may read."""
    if not window:
        return list(range(source_layers))
    centre = round(t * (source_layers - 1) / max(1, target_layers - 1))
    last_aligned = t + source_layers - target_layers
    near = {c + d for c in (centre, last_aligned) for d in range(-window, window + 1)}
    return sorted(c for c in near if 0 <= c < source_layers)


def _fit_layer(
    moments: Moments, holdout: Holdout, t: int, source: ModelSpec, target: ModelSpec, options: FitOptions
) -> tuple[Solution, Solution]:
    chooser = LayerChooser(moments, holdout, candidates(t, source.num_layers, target.num_layers, options.window))
    width = _width(target)
    k, v = (slice((2 * t + h) * width, (2 * t + h + 1) * width) for h in (0, 1))
    return (
        solve(moments, holdout, chooser.choose(k, options.layers_per_target), k, options.lambdas),
        solve(moments, holdout, chooser.choose(v, options.layers_per_target), v, options.lambdas),
    )


def _describe(t: int, half: int, s: Solution) -> LayerFit:
    return LayerFit(t, "kv"[half], s.at, s.ridge, s.r2)


def _assemble(
    solutions: Sequence[tuple[Solution, Solution]], source: ModelSpec, target: ModelSpec, gains: Tensor | None
) -> LinearProjector:
    parameters = LinearParameters(
        source_layers=source.num_layers,
        source_width=_width(source),
        target_layers=target.num_layers,
        target_width=_width(target),
        sources=[[s.at for s in pair] for pair in solutions],
        shell_dim=target.head_dim if gains is not None else 0,
    )
    weights = [[s.weight for s in pair] for pair in solutions]
    biases = torch.stack([torch.stack([s.bias for s in pair]) for pair in solutions])
    return LinearProjector(parameters, weights, biases, gains)


def key_gains(target: CaptureStore) -> Tensor:
    """The target's `k_norm` gains, fp32 `[layers, head_dim]`, read from its weights. Raises ModelError if it has none."""
    found: dict[int, Tensor] = {}
    for path in sorted(Path(target.folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dict
                if name.endswith(".self_attn.k_norm.weight"):
                    found[int(name.split(".")[-4])] = weights.get_tensor(name).to(torch.float32)
    gains = [found.get(t) for t in range(target.spec.num_layers)]
    if not all(g is not None and len(g) == target.spec.head_dim and bool((g.abs() > 1e-4).all()) for g in gains):
        raise ModelError("no usable k_norm gains", key=target.spec.name, fix="Fit without the key shell.")
    return torch.stack([g for g in gains if g is not None])
