"""The baseline: issue #1520's projector, trained as the issue has it — from one source layer, on keys as stored (rotated).

    K_source[last-aligned layer] ─► Linear ─GELU─► Linear ─GELU─► Linear ─► K_target      and V likewise

Trained by Adam on the mean squared error over the same documents that the ridge reads. Inputs and outputs are standardised
while training and the scales folded into the first and last weights afterwards; training stops when the held-out error no
longer falls, and the best epoch is kept. Its gate stays wide open: there is nothing to gate against when the cache is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.nn.functional import gelu

from moonpool.c2c.fitting.capture import CaptureStore
from moonpool.c2c.fitting.features import rows
from moonpool.c2c.fitting.ridge import Documents
from moonpool.c2c.projectors.mlp import MlpParameters, MlpProjector, MlpWeights
from moonpool.c2c.signature import ModelSpec
from moonpool.errors import ConversionError

_NAMES = ("w1", "b1", "w2", "b2", "w3", "b3")
_OPEN_GATE = 30.0
"""Logit whose sigmoid is 1 in fp32."""


class MlpOptions(msgspec.Struct, frozen=True, kw_only=True):
    hidden: int = 512
    epochs: int = 40
    """At most; `patience` epochs without a better held-out error end it."""
    patience: int = 3
    batch: int = 256
    learning_rate: float = 1e-3
    seed: int = 0


class MlpFit(msgspec.Struct, frozen=True):
    projector: MlpProjector
    epochs: int
    heldout_mse: float
    """Of standardised outputs: 1 is as bad as the mean, 0 perfect."""
    tokens: int


def fit_mlp(
    source: CaptureStore, target: CaptureStore, documents: Documents, options: MlpOptions, console: Console
) -> MlpFit:
    """Train. Memory: the rows in fp32, `4 B × tokens × (source + target KV widths)`, printed first."""
    sources = last_aligned(source.spec.num_layers, target.spec.num_layers)
    pairs = 2 * target.spec.num_layers
    tokens = sum(len(d) - 1 for d in documents.train)
    need = 4 * tokens * pairs * (_width(source.spec) + _width(target.spec))
    console.print(f"mlp rows: {need / 1e9:.2f} GB")
    x, y = _load(source, target, documents.train, sources)
    held_x, held_y = _load(source, target, documents.choose, sources)
    scales = [_standardise(a, b) for a, b in ((x, held_x), (y, held_y))]
    weights, epochs, error = _train(x, y, held_x, held_y, options, console)
    projector = _fold(weights, scales, sources, source.spec, target.spec, options.hidden)
    return MlpFit(projector, epochs, error, tokens)


def last_aligned(source_layers: int, target_layers: int) -> list[int]:
    """The last layers face each other, and so on downwards; a deeper target reads layer 0 several times."""
    return [max(0, t + source_layers - target_layers) for t in range(target_layers)]


def _width(spec: ModelSpec) -> int:
    return spec.num_kv_heads * spec.head_dim


def _load(
    source: CaptureStore, target: CaptureStore, documents: list[Tensor], sources: list[int]
) -> tuple[Tensor, Tensor]:
    """x `[P, N, Ws]`, y `[P, N, Wt]` with P = target layers × halves; position 0 left out, keys rotated."""
    xs, ys = [], []
    for tokens in documents:
        xs.append(rows(source.get(tokens), None)[1:, sources].flatten(1, 2).transpose(0, 1))
        ys.append(rows(target.get(tokens), None)[1:].flatten(1, 2).transpose(0, 1))
    return torch.cat(xs, 1), torch.cat(ys, 1)


def _standardise(train: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """Both in place, by the training rows' mean and deviation, which are returned `[P, 1, W]`."""
    mean, deviation = train.mean(1, keepdim=True), train.std(1, keepdim=True).clamp(min=1e-6)
    for t in (train, held):
        t.sub_(mean).div_(deviation)
    return mean, deviation


def _forward(w: dict[str, Tensor], x: Tensor) -> Tensor:
    h = gelu(torch.baddbmm(w["b1"][:, None], x, w["w1"]))
    h = gelu(torch.baddbmm(w["b2"][:, None], h, w["w2"]))
    return torch.baddbmm(w["b3"][:, None], h, w["w3"])


def _initial(pairs: int, widths: tuple[int, int, int], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    source, hidden, target = widths
    shapes = {"w1": (source, hidden), "w2": (hidden, hidden), "w3": (hidden, target)}
    found = {n: torch.randn(pairs, *s, generator=generator) / math.sqrt(s[0]) for n, s in shapes.items()}
    found |= {n.replace("w", "b"): torch.zeros(pairs, s[1]) for n, s in shapes.items()}
    return {n: t.requires_grad_() for n, t in found.items()}


def _train(
    x: Tensor, y: Tensor, held_x: Tensor, held_y: Tensor, o: MlpOptions, console: Console
) -> tuple[dict[str, Tensor], int, float]:
    """(weights of the best epoch, epochs run, held-out error)."""
    weights = _initial(x.shape[0], (x.shape[2], o.hidden, y.shape[2]), o.seed)
    adam = torch.optim.Adam(weights.values(), lr=o.learning_rate)
    shuffle = torch.Generator().manual_seed(o.seed)
    best, best_at, kept, epoch = math.inf, 0, {n: w.detach().clone() for n, w in weights.items()}, 0
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("mlp", total=o.epochs)
        for epoch in range(1, o.epochs + 1):
            for at in _batches(x.shape[1], o.batch, shuffle):
                adam.zero_grad(set_to_none=True)
                # The sum over networks: each has its own mean, so they do not disturb one another.
                (_forward(weights, x[:, at]) - y[:, at]).square().mean((1, 2)).sum().backward()
                adam.step()
            error = _error(weights, held_x, held_y)
            progress.update(task, completed=epoch, description=f"mlp, held-out MSE {error:.4f}")
            if error < best:
                best, best_at, kept = error, epoch, {n: w.detach().clone() for n, w in weights.items()}
            elif epoch - best_at >= o.patience:
                break
    if not math.isfinite(best):
        raise ConversionError("the mlp diverged", have=f"held-out error {best}", fix="Use a lower learning rate.")
    return kept, epoch, best


def _batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    yield from torch.randperm(count, generator=generator).split(size)


@torch.no_grad()
def _error(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> float:
    parts = [(_forward(weights, a) - b).square().sum() for a, b in zip(x.split(512, 1), y.split(512, 1), strict=True)]
    return float(torch.stack(parts).sum()) / y.numel()


def _fold(
    weights: dict[str, Tensor],
    scales: list[tuple[Tensor, Tensor]],
    sources: list[int],
    source: ModelSpec,
    target: ModelSpec,
    hidden: int,
) -> MlpProjector:
    """Standardisation taken into the first and the last layer, so that the projector works on raw KV."""
    (x_mean, x_dev), (y_mean, y_dev) = scales
    w1 = weights["w1"] / x_dev.transpose(1, 2)
    folded = {
        **weights,
        "w1": w1,
        "b1": weights["b1"] - (x_mean @ w1)[:, 0],
        "w3": weights["w3"] * y_dev,
        "b3": weights["b3"] * y_dev[:, 0] + y_mean[:, 0],
    }
    layers = target.num_layers
    parameters = MlpParameters(
        source_layers=source.num_layers,
        source_width=_width(source),
        target_layers=layers,
        target_width=_width(target),
        hidden=hidden,
        sources=sources,
    )
    stacked = {n: folded[n].detach().unflatten(0, (layers, 2)).contiguous() for n in _NAMES}
    return MlpProjector(parameters, MlpWeights(**stacked, gate=torch.full((layers, 2), _OPEN_GATE)))
