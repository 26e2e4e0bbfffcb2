"""Values fitted for what attention makes of them.

Attention reads values only as weighted averages, and an average forgives errors that differ from token to token but none that
all tokens share. So rows `A · V_source → A · V_target` (A: the target's native attention) are put beside the plain rows, and how
much they count is chosen on held-out documents by the error of the attention output; none at all is among the choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from moonpool.c2c.fitting.attention import Asked, Judge, asked
from moonpool.c2c.fitting.gather import Pass, width_of
from moonpool.c2c.fitting.moments import Moments
from moonpool.c2c.fitting.selection import Holdout, Solution, solve

SHARES = (0.0, 0.3, 0.6, 0.8, 0.9)
"""Weight of the averaged rows of all rows, each kind scaled to the same variance of the target's values."""
_ROWS_AT_ONCE = 512
_LEAST = 1e-3


@dataclass
class _Layer:
    """Averaged rows of one target layer, gathered in heaps: the accumulators are large against one document's rows."""

    at: list[int]
    moments: Moments
    heap: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def add(self, x: Tensor, y: Tensor, w: Tensor) -> None:
        self.heap.append((x, y, w))
        if sum(len(r[2]) for r in self.heap) >= _ROWS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        if self.heap:
            self.moments.add(*(torch.cat(part) for part in zip(*self.heap, strict=True)))
            self.heap = []


def averaged(
    rows: Pass, documents: Sequence[Tensor], sources: Sequence[list[int]], width: int, queries: int, console: Console
) -> list[Moments]:
    """Moments of averaged rows for each target layer, from its source layers `sources[t]` (places, `width` columns each) to its
    values. One row per query, the query heads taking turns. Memory: 8 B x Σ (source columns of a layer)², and some rows."""
    target = width_of(rows.target.spec)
    layers = [_Layer(at, Moments(at, width, target)) for at in sources]
    for tokens in track(documents, "averaged values", console=console, transient=True):
        x, y, _ = rows.document(tokens)
        for t, native in enumerate(asked(rows.target, tokens, range(len(layers)), queries)):
            share = _shares(native)
            seen = share.sum(1, keepdim=True).clamp(min=_LEAST)
            layers[t].add(share @ x[:, layers[t].at].flatten(1) / seen, share @ y[:, t, 1] / seen, seen[:, 0].square())
    for layer in layers:
        layer.flush()
    return [layer.moments for layer in layers]


def _shares(native: Asked) -> Tensor:
    """Attention `[n, N - 1]` of one head per query to all tokens but position 0, whose values stay native."""
    heads = native.native.flatten(0, 1)
    n = heads.shape[1]
    return heads[torch.arange(n) % len(heads), torch.arange(n), 1:]


class Repair:
    """Solves a target layer's values once more, with its averaged rows."""

    def __init__(self, moments: Moments, holdout: Holdout, lambdas: Sequence[float]) -> None:
        self._m, self._holdout, self._lambdas = moments, holdout, lambdas

    def __call__(self, plain: Solution, rows: Moments, columns: slice, judge: Judge) -> tuple[Solution, float]:
        """The best solution by `judge`, and the share of averaged rows that made it. `columns`: the layer's values."""
        places, y = list(range(len(plain.at))), torch.arange(columns.start, columns.stop)
        own = self._m.part(plain.at, torch.arange(self._m.layer_width), y)
        held = Holdout(self._holdout.x[:, plain.at], self._holdout.y[:, columns], self._holdout.weight)
        every = slice(0, len(y))
        ratio = float(own.variance_y(every).sum() * own.weight / (rows.variance_y(every).sum() * rows.weight + 1e-12))
        best = (plain, 0.0)
        least = judge.values(plain.predict(self._holdout.x[: judge.rows]))
        for share in SHARES[1:]:
            mixed = own.scaled(1 - share)
            mixed.merge(rows.scaled(share * ratio))
            found = solve(mixed, held, places, every, self._lambdas)
            if (error := judge.values(found.predict(held.x[: judge.rows]))) < least:
                least, best = error, (Solution(plain.at, found.weight, found.bias, found.ridge, found.r2), share)
        return best
