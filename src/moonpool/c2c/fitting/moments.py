"""Streaming second moments of (source features, target features): all that a ridge needs, whatever layers it then reads.

    x  [N, D]   the candidate source layers side by side, each K (content) then V: D = layers × 2 × source width
    y  [N, E]   the target likewise: E = target layers × 2 × target width

One pass gathers `xx = Σ w x xᵀ`, `xy = Σ w x yᵀ`, the sums and the weights; any subset of the source layers is then a
sub-matrix, so trying hundreds of layer choices reads no KV again.

Accumulators are fp64: thousands of fp32 sums would lose the small eigenvalues that the ridge term is there to judge. The
products of one block of rows are fp32, twice as fast: rows are taken relative to a fixed shift (about their mean, so that a
large mean does not eat the digits of a small variance), and a block's error of 1e-7 is random and averages out over blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from moonpool.errors import BundleCorrupt, ConfigError

_SUMS = ("xx", "xy", "x", "y", "y2", "weight")
_NAMES = (*_SUMS, "shift_x", "shift_y", "layers", "done")
_TINY = 1e-12
_BLOCK_ROWS = 2048
"""Rows whose products are summed in fp32."""


class Moments:
    """Weighted moments over rows. `layers` names the source layers that the columns of `x` stand for, ascending. The sums are
    of rows less `shift_x`, `shift_y`, which the first rows decide; read them through the methods, which do not depend on it."""

    def __init__(self, layers: Sequence[int], layer_width: int, target_width: int) -> None:
        """`layer_width`: columns of one source layer (K and V); `target_width`: E."""
        d = len(layers) * layer_width
        self.layers, self.layer_width = list(layers), layer_width
        self.xx = torch.zeros(d, d, dtype=torch.float64)
        """Only blocks on and above the diagonal are filled; read through `covariance`."""
        self.xy = torch.zeros(d, target_width, dtype=torch.float64)
        self.x = torch.zeros(d, dtype=torch.float64)
        self.y = torch.zeros(target_width, dtype=torch.float64)
        self.y2 = torch.zeros(target_width, dtype=torch.float64)
        self.weight = torch.zeros((), dtype=torch.float64)
        self.shift_x, self.shift_y = self.x.clone(), self.y.clone()
        self.done = 0
        """Documents that went in, for whoever resumes a pass."""

    @staticmethod
    def bytes_needed(layers: int, layer_width: int, target_width: int) -> int:
        """Memory of the accumulators."""
        d = layers * layer_width
        return 8 * (d * d + d * target_width)

    def add(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        """Take in rows `x` `[N, D]`, `y` `[N, E]`, of any float type; `weights` `[N]`, by default 1 each."""
        if not len(x):
            return
        if not self.weight:
            # Numbers that fp32 holds exactly: what is taken off a row is what the means get back.
            self.shift_x, self.shift_y = (t.to(torch.float64).mean(0).float().to(torch.float64) for t in (x, y))
        w = torch.ones(len(x), dtype=torch.float64) if weights is None else weights.to(torch.float64)
        for part in zip(x.split(_BLOCK_ROWS), y.split(_BLOCK_ROWS), w.split(_BLOCK_ROWS), strict=True):
            self._add_block(*part)

    def _add_block(self, x: Tensor, y: Tensor, w: Tensor) -> None:
        root = w.sqrt().float()
        x = (x.float() - self.shift_x.float()) * root[:, None]
        y = (y.float() - self.shift_y.float()) * root[:, None]
        for i in range(0, x.shape[1], self.layer_width):
            block = slice(i, i + self.layer_width)
            self.xx[block, i:] += x[:, block].T @ x[:, i:]
        self.xy += x.T @ y
        self.x += torch.mv(x.T, root)
        self.y += torch.mv(y.T, root)
        self.y2 += y.square().sum(0)
        self.weight += w.sum()

    def merge(self, other: Moments) -> None:
        """Take in another pass over other rows of the same columns. Raises ConfigError if the columns differ."""
        if (self.layers, self.xy.shape) != (other.layers, other.xy.shape):
            raise ConfigError("moments of other layers", need=str(self.layers), have=str(other.layers))
        if not self.weight:
            self.shift_x, self.shift_y = other.shift_x, other.shift_y
        a, b = other.shift_x - self.shift_x, other.shift_y - self.shift_y
        # Σ w (r + a)(r + a)ᵀ in terms of the other's sums of r.
        self.xx += other.xx + torch.outer(a, other.x + other.weight * a) + torch.outer(other.x, a)
        self.xy += other.xy + torch.outer(a, other.y + other.weight * b) + torch.outer(other.x, b)
        self.y2 += other.y2 + b * (2 * other.y + other.weight * b)
        self.x += other.x + other.weight * a
        self.y += other.y + other.weight * b
        self.weight += other.weight
        self.done += other.done

    def part(self, at: Sequence[int], x: Tensor, y: Tensor) -> Moments:
        """Moments of the source layers at these places, of the columns `x` (indices) of each, and target columns `y`."""
        columns = torch.cat([i * self.layer_width + x for i in at])
        found = Moments([self.layers[i] for i in at], len(x), len(y))
        found.xx, found.xy = self.xx[columns[:, None], columns], self.xy[columns[:, None], y]
        found.x, found.y, found.y2 = self.x[columns], self.y[y], self.y2[y]
        found.shift_x, found.shift_y = self.shift_x[columns], self.shift_y[y]
        found.weight, found.done = self.weight.clone(), self.done
        return found

    def through(self, down: Tensor) -> Moments:
        """Moments of the rows `x · down` (`down` fp64 `[D, r]`), which stand as one source layer 0."""
        half = down.T @ (self.xx.triu() @ down)
        found = Moments([], 1, 0)
        found.layers, found.layer_width, found.done = [0], down.shape[1], self.done
        found.xx, found.xy = half + half.T - down.T @ (self.xx.diagonal()[:, None] * down), down.T @ self.xy
        found.x, found.y, found.y2 = self.x @ down, self.y, self.y2
        found.shift_x, found.shift_y, found.weight = self.shift_x @ down, self.shift_y, self.weight
        return found

    def scaled(self, factor: float) -> Moments:
        """The same rows with `factor` times the weight."""
        found = Moments([], 1, 0)
        found.layers, found.layer_width, found.done = self.layers, self.layer_width, self.done
        found.shift_x, found.shift_y = self.shift_x, self.shift_y
        for name in _SUMS:
            setattr(found, name, getattr(self, name) * factor)
        return found

    def mean_x(self, at: Sequence[int]) -> Tensor:
        """Mean of the columns of the source layers at places `at` of `layers`, fp64 `[len(at) * layer_width]`."""
        return torch.cat([self.shift_x[self._block(i)] for i in at]) + self._offset_x(at)

    def deviation(self, at: Sequence[int]) -> Tensor:
        """Standard deviation of those columns; 1 where a column does not vary."""
        second = torch.cat([self.xx.diagonal()[self._block(i)] for i in at]) / self.weight
        variance = second - self._offset_x(at).square()
        return torch.where(variance > _TINY * (second + _TINY), variance.clamp(min=_TINY), 1.0).sqrt()

    def covariance(self, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
        """Centred `[len(rows) * w, len(columns) * w]` for source layers at these places."""
        raw = torch.cat([torch.cat([self._raw(i, j) for j in columns], 1) for i in rows])
        return (raw / self.weight).sub_(torch.outer(self._offset_x(rows), self._offset_x(columns)))

    def cross(self, rows: Sequence[int], columns: slice) -> Tensor:
        """Centred covariance of source layers at these places with target columns `[len(rows) * w, columns]`."""
        raw = torch.cat([self.xy[self._block(i), columns] for i in rows]) / self.weight
        return raw.sub_(torch.outer(self._offset_x(rows), self.y[columns] / self.weight))

    def correlation(self) -> Tensor:
        """Correlations of all columns of x; only blocks on and above the diagonal are filled. One copy, not several."""
        every = range(len(self.layers))
        inverse, offset = 1 / self.deviation(every), self._offset_x(every)
        found = self.xx / self.weight
        return found.addr_(offset, offset, alpha=-1).mul_(inverse[:, None]).mul_(inverse)

    def mean_y(self, columns: slice) -> Tensor:
        return self.shift_y[columns] + self.y[columns] / self.weight

    def variance_y(self, columns: slice) -> Tensor:
        return self.y2[columns] / self.weight - (self.y[columns] / self.weight).square()

    def _offset_x(self, at: Sequence[int]) -> Tensor:
        return torch.cat([self.x[self._block(i)] for i in at]) / self.weight

    def _block(self, i: int) -> slice:
        return slice(i * self.layer_width, (i + 1) * self.layer_width)

    def _raw(self, i: int, j: int) -> Tensor:
        return self.xx[self._block(i), self._block(j)] if i <= j else self.xx[self._block(j), self._block(i)].T

    def save(self, path: Path) -> None:
        """Write as safetensors, whole or not at all."""
        tensors = {n: getattr(self, n) for n in (*_SUMS, "shift_x", "shift_y")}
        temporary = path.with_suffix(".tmp")
        save_file({**tensors, "layers": torch.tensor(self.layers), "done": torch.tensor(self.done)}, temporary)
        temporary.replace(path)

    @staticmethod
    def load(path: Path) -> Moments:
        """Inverse of `save`. Raises BundleCorrupt."""
        try:
            found = load_file(path)
        except (SafetensorError, OSError) as e:
            raise BundleCorrupt(f"unreadable moments: {e}", key=str(path)) from e
        if set(found) != set(_NAMES):
            raise BundleCorrupt("not a moments file", key=str(path), need=", ".join(_NAMES), have=", ".join(found))
        layers = found.pop("layers").tolist()
        moments = Moments([], 1, 0)
        moments.layers, moments.layer_width = layers, len(found["x"]) // max(1, len(layers))
        moments.done = int(found.pop("done"))
        for name, tensor in found.items():
            setattr(moments, name, tensor)
        return moments
