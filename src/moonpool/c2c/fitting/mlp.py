"""The baseline: issue #1520's projector, trained as the issue has it — from one source layer, on keys as stored (rotated).

    K_source[last-aligned layer] ─► Linear ─GELU─► Linear ─GELU─► Linear ─► K_target      and V likewise

Trained by Adam on the mean squared error over the same documents that the ridge reads, a group of documents at a time, so that
memory does not grow with them. Inputs and outputs are standardised while training and the scales folded into the first and last
weights afterwards; training stops when the held-out error no longer falls, and the best epoch is kept. Its gate stays wide open:
there is nothing to gate against when the cache is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

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
    group: int = 64
    """Documents whose rows are in memory together, and shuffled among each other."""
    compute: torch.dtype = torch.float32
    """Of the products; bf16 is several times faster where the machine has units for it."""


class MlpFit(msgspec.Struct, frozen=True):
    projector: MlpProjector
    epochs: int
    heldout_mse: float
    """Of standardised outputs: 1 is as bad as the mean, 0 perfect."""
    tokens: int


def fit_mlp(
    source: CaptureStore, target: CaptureStore, documents: Documents, options: MlpOptions, console: Console
) -> MlpFit:
    """Train. Memory: the rows of a group in fp32, `4 B × tokens × layers × 2 × (source + target KV width)`, printed first."""
    rows_ = _Rows(source, target, last_aligned(source.spec.num_layers, target.spec.num_layers))
    tokens = [len(d) - 1 for d in documents.train]
    most = sum(sorted(tokens)[-options.group :])
    need = 4 * most * 2 * target.spec.num_layers * (_width(source.spec) + _width(target.spec))
    console.print(f"mlp rows: {need / 1e9:.2f} GB at a time")
    x_scale, y_scale = rows_.scales(documents.train)
    held = rows_.load(documents.choose, x_scale, y_scale)
    weights, epochs, error = _train(_Training(rows_, documents.train, (x_scale, y_scale), held), options, console)
    projector = _fold(weights, [x_scale, y_scale], rows_.sources, source.spec, target.spec, options.hidden)
    return MlpFit(projector, epochs, error, sum(tokens))


def last_aligned(source_layers: int, target_layers: int) -> list[int]:
    """The last layers face each other, and so on downwards; a deeper target reads layer 0 several times."""
    return [max(0, t + source_layers - target_layers) for t in range(target_layers)]


def _width(spec: ModelSpec) -> int:
    return spec.num_kv_heads * spec.head_dim


_Scale = tuple[Tensor, Tensor]
"""Mean and deviation, each `[P, 1, W]` with P = target layers × halves."""


class _Rows:
    """Rows of both models, P side by side; position 0 left out, keys rotated."""

    def __init__(self, source: CaptureStore, target: CaptureStore, sources: list[int]) -> None:
        self._source, self._target, self.sources = source, target, sources

    def load(self, documents: Sequence[Tensor], x_scale: _Scale, y_scale: _Scale) -> tuple[Tensor, Tensor]:
        """Standardised x `[P, N, Ws]`, y `[P, N, Wt]`."""
        pairs = [self._document(d) for d in documents]
        x, y = (torch.cat(parts, 1) for parts in zip(*pairs, strict=True))
        return x.sub_(x_scale[0]).div_(x_scale[1]), y.sub_(y_scale[0]).div_(y_scale[1])

    def scales(self, documents: Sequence[Tensor]) -> tuple[_Scale, _Scale]:
        """Of x and of y, over all rows."""
        count, sums = 0, [torch.zeros((), dtype=torch.float64)] * 4
        for d in documents:
            both = [t.to(torch.float64) for t in self._document(d)]
            count += both[0].shape[1]
            sums = [s + t for s, t in zip(sums, [m for t in both for m in (t.sum(1), t.square().sum(1))], strict=True)]
        return _scale(sums[0], sums[1], count), _scale(sums[2], sums[3], count)

    def _document(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = rows(self._source.get(tokens), None)[1:, self.sources].flatten(1, 2).transpose(0, 1)
        return x, rows(self._target.get(tokens), None)[1:].flatten(1, 2).transpose(0, 1)


def _scale(total: Tensor, squares: Tensor, count: int) -> _Scale:
    mean, second = total / count, squares / count
    deviation = (second - mean.square()).clamp(min=0).sqrt().clamp(min=1e-6)
    return mean.float()[:, None], deviation.float()[:, None]


class _Training(msgspec.Struct, frozen=True):
    """What the networks learn from, and the held-out rows that judge them."""

    rows: _Rows
    documents: list[Tensor]
    scales: tuple[_Scale, _Scale]
    held: tuple[Tensor, Tensor]

    def groups(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """The documents in a new order, `size` at a time."""
        for part in torch.randperm(len(self.documents), generator=generator).split(size):
            yield self.rows.load([self.documents[i] for i in part.tolist()], *self.scales)


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


def _train(t: _Training, o: MlpOptions, console: Console) -> tuple[dict[str, Tensor], int, float]:
    """(weights of the best epoch, epochs run, held-out error)."""
    held_x, held_y = t.held
    weights = _initial(held_x.shape[0], (held_x.shape[2], o.hidden, held_y.shape[2]), o.seed)
    adam = torch.optim.Adam(weights.values(), lr=o.learning_rate)
    shuffle = torch.Generator().manual_seed(o.seed)
    best, best_at, kept, epoch = math.inf, 0, {n: w.detach().clone() for n, w in weights.items()}, 0
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("mlp", total=o.epochs)
        for epoch in range(1, o.epochs + 1):
            for x, y in t.groups(o.group, shuffle):
                for at in _batches(x.shape[1], o.batch, shuffle):
                    adam.zero_grad(set_to_none=True)
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=o.compute is torch.bfloat16):
                        made = _forward(weights, x[:, at])
                    # The sum over networks: each has its own mean, so they do not disturb one another.
                    (made.float() - y[:, at]).square().mean((1, 2)).sum().backward()
                    adam.step()
                progress.advance(task, len(x[0]) / max(1, sum(map(len, t.documents))))
            error = _error(weights, held_x, held_y)
            progress.update(task, description=f"mlp, held-out MSE {error:.4f}")
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
    scales: list[_Scale],
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
