"""Streaming second moments of (source features, target features): all that a ridge needs, whatever layers it then reads.

    x  [N, D]   the candidate source layers side by side, each K (content) then V: D = layers × 2 × source width
    y  [N, E]   the target likewise: E = target layers × 2 × target width

One pass gathers `xx = Σ w x xᵀ`, `xy = Σ w x yᵀ`, the sums and the weights; any subset of the source layers is then a
sub-matrix, so trying hundreds of layer choices reads no KV again. Accumulators are fp64: 24 000 squared values of an fp32 sum
would already lose the small eigenvalues that the ridge term is there to judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from moonpool.errors import BundleCorrupt, ConfigError

_NAMES = ("xx", "xy", "x", "y", "y2", "weight", "layers")
_TINY = 1e-12


class Moments:
    """Weighted moments over rows. `layers` names the source layers that the columns of `x` stand for, ascending."""

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

    @staticmethod
    def bytes_needed(layers: int, layer_width: int, target_width: int) -> int:
        """Memory of the accumulators."""
        d = layers * layer_width
        return 8 * (d * d + d * target_width)

    def add(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        """Take in rows `x` `[N, D]`, `y` `[N, E]`, of any float type; `weights` `[N]`, by default 1 each."""
        x, y = x.to(torch.float64), y.to(torch.float64)
        w = torch.ones(len(x), dtype=torch.float64) if weights is None else weights.to(torch.float64)
        xw = x * w[:, None]
        for i in range(0, x.shape[1], self.layer_width):
            block = slice(i, i + self.layer_width)
            self.xx[block, i:].addmm_(xw[:, block].T, x[:, i:])
        self.xy.addmm_(xw.T, y)
        self.x += xw.sum(0)
        self.y += w @ y
        self.y2 += w @ y.square()
        self.weight += w.sum()

    def merge(self, other: Moments) -> None:
        """Take in another pass over other rows of the same columns. Raises ConfigError if the columns differ."""
        if (self.layers, self.xy.shape) != (other.layers, other.xy.shape):
            raise ConfigError("moments of other layers", need=str(self.layers), have=str(other.layers))
        for name in ("xx", "xy", "x", "y", "y2", "weight"):
            getattr(self, name).add_(getattr(other, name))

    def mean_x(self, at: Sequence[int]) -> Tensor:
        """Mean of the columns of the source layers at places `at` of `layers`, fp64 `[len(at) * layer_width]`."""
        return torch.cat([self.x[self._block(i)] for i in at]) / self.weight

    def deviation(self, at: Sequence[int]) -> Tensor:
        """Standard deviation of those columns; 1 where a column does not vary."""
        second = torch.cat([self.xx.diagonal()[self._block(i)] for i in at]) / self.weight
        variance = second - self.mean_x(at).square()
        return torch.where(variance > _TINY * (second + _TINY), variance.clamp(min=_TINY), 1.0).sqrt()

    def covariance(self, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
        """Centred `[len(rows) * w, len(columns) * w]` for source layers at these places."""
        raw = torch.cat([torch.cat([self._raw(i, j) for j in columns], 1) for i in rows])
        return (raw / self.weight).sub_(torch.outer(self.mean_x(rows), self.mean_x(columns)))

    def cross(self, rows: Sequence[int], columns: slice) -> Tensor:
        """Centred covariance of source layers at these places with target columns `[len(rows) * w, columns]`."""
        raw = torch.cat([self.xy[self._block(i), columns] for i in rows]) / self.weight
        return raw.sub_(torch.outer(self.mean_x(rows), self.mean_y(columns)))

    def mean_y(self, columns: slice) -> Tensor:
        return self.y[columns] / self.weight

    def variance_y(self, columns: slice) -> Tensor:
        return self.y2[columns] / self.weight - self.mean_y(columns).square()

    def _block(self, i: int) -> slice:
        return slice(i * self.layer_width, (i + 1) * self.layer_width)

    def _raw(self, i: int, j: int) -> Tensor:
        return self.xx[self._block(i), self._block(j)] if i <= j else self.xx[self._block(j), self._block(i)].T

    def save(self, path: Path) -> None:
        """Write as safetensors, whole or not at all."""
        tensors = {n: getattr(self, n) for n in _NAMES if n != "layers"}
        temporary = path.with_suffix(".tmp")
        save_file({**tensors, "layers": torch.tensor(self.layers)}, temporary)
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
        for name, tensor in found.items():
            setattr(moments, name, tensor)
        return moments
