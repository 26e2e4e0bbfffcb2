"""Pages of the source → pages of the target: the converter's arithmetic, without pool, threads or files.

    bf16 pages ─► fp32 x [N, Ls, 2, Ws], keys un-rotated ─► projector ─► fp32 y [N, Lt, 2, Wt] ─► keys rotated ─► bf16 pages

All pages of a call go through together, so each target layer is one matrix product over all their tokens. Rounding to bf16
happens once, to nearest even.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moonpool.c2c import pages as codec
from moonpool.c2c.projectors.base import Projector
from moonpool.c2c.rope import inverse_rotation, rotate_between, rotation
from moonpool.c2c.signature import ModelSpec
from moonpool.errors import ConversionRefused, MoonpoolError, WrongSize

_TOKENS_AT_ONCE = 2048
"""Bounds the fp32 intermediates (about 0.2 GiB for a 1.5B source); more tokens make no product faster."""


class Conversion:
    """One projector between two models at one page size. Immutable; threads may share it."""

    def __init__(self, projector: Projector, source: ModelSpec, target: ModelSpec, page_size: int) -> None:
        self.source, self.target, self.page_size = source, target, page_size
        self.projector = projector
        self.source_shape, self.target_shape = source.page_shape(page_size), target.page_shape(page_size)
        self.source_bytes, self.target_bytes = self.source_shape.nbytes, self.target_shape.nbytes
        self._read = projector.source_layers()
        for role, need, spec in (
            ("source", projector.source_shape, source),
            ("target", projector.target_shape, target),
        ):
            have = (spec.num_layers, spec.num_kv_heads * spec.head_dim)
            if need != have:
                raise ConversionRefused(
                    f"the projector's {role} has another shape",
                    key=spec.name,
                    need=f"{need} layers, width",
                    have=f"{have}",
                )

    def run(
        self, pages: Sequence[memoryview | bytes], indices: Sequence[int], outs: Sequence[memoryview]
    ) -> list[MoonpoolError | None]:
        """Convert `pages[i]`, the `indices[i]`-th page of its sequence, into `outs[i]`. One result per page: None, or why this
        page was refused (WrongSize; ConversionRefused for NaN or Inf), in which case its `out` is not to be used."""
        errors: list[MoonpoolError | None] = [self._size_error(p, o) for p, o in zip(pages, outs, strict=True)]
        good = [i for i, e in enumerate(errors) if e is None]
        at_once = max(1, _TOKENS_AT_ONCE // self.page_size)
        for start in range(0, len(good), at_once):
            group = good[start : start + at_once]
            bad = self._run_group([pages[i] for i in group], [indices[i] for i in group], [outs[i] for i in group])
            for i in bad:
                errors[group[i]] = ConversionRefused(
                    "source page holds NaN or Inf", key=self.source.name, have=f"page {indices[group[i]]}"
                )
        return errors

    def _size_error(self, page: memoryview | bytes, out: memoryview) -> MoonpoolError | None:
        if len(page) != self.source_bytes:
            need, have = f"{self.source_bytes} B ({self.source_shape})", f"{len(page)} B"
            return WrongSize("source page of the wrong size", key=self.source.name, need=need, have=have)
        if len(out) != self.target_bytes:
            need, have = f"{self.target_bytes} B ({self.target_shape})", f"{len(out)} B"
            return WrongSize("target page of the wrong size", key=self.target.name, need=need, have=have)
        return None

    def _run_group(
        self, pages: Sequence[memoryview | bytes], indices: Sequence[int], outs: Sequence[memoryview]
    ) -> list[int]:
        """Convert all; returns the places of pages whose result is not finite."""
        halves = [codec.unpack(p, self.source_shape) for p in pages]
        y = self.project_kv(
            torch.cat([k for k, _ in halves]), torch.cat([v for _, v in halves]), positions(indices, self.page_size)
        )
        # The sum is finite exactly if every addend is (fp32 sums of these magnitudes do not overflow): one pass.
        finite = torch.isfinite(y.view(len(pages), -1).sum(1, dtype=torch.float64))
        for i, out in enumerate(outs):
            rows = y[i * self.page_size : (i + 1) * self.page_size]
            codec.pack_into(out, rows[:, :, 0], rows[:, :, 1])
        return torch.nonzero(~finite).flatten().tolist()

    def project_kv(self, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        """`k`, `v` as stored, `[N, Ls, heads, dim]`, at absolute positions `at` → fp32 `[N, Lt, 2, heads, dim]`, keys rotated for
        the target, not yet rounded."""
        n, shape = k.shape[0], self.source_shape
        x = torch.empty(n, shape.layers, 2, shape.heads, shape.dim)
        for first, last in _runs(self._read):
            x[:, first:last, 1].copy_(v[:, first:last])
            keys = k[:, first:last].to(torch.float32)
            if self.projector.key_space == "content":
                inverse_rotation(at, self.source.rope).apply(keys, out=x[:, first:last, 0])
            else:
                x[:, first:last, 0].copy_(keys)
        y = self.projector.project(x.view(n, shape.layers, 2, shape.width))
        y = y.view(n, self.target_shape.layers, 2, self.target_shape.heads, self.target_shape.dim)
        match self.projector.key_space:
            case "content":
                y[:, :, 0] = rotation(at, self.target.rope).apply(y[:, :, 0])
            case "invariant":
                y[:, :, 0] = rotate_between(y[:, :, 0], at, self.source.rope, self.target.rope)
            case "rotated":
                pass
        return y


def positions(indices: Sequence[int], page_size: int) -> Tensor:
    """Absolute positions of the tokens of these pages, `[len(indices) * page_size]`."""
    starts = torch.tensor(indices, dtype=torch.int64) * page_size
    return (starts[:, None] + torch.arange(page_size)).flatten()


def _runs(layers: list[int]) -> list[tuple[int, int]]:
    """Neighbouring layers as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer:
            runs[-1] = (runs[-1][0], layer + 1)
        else:
            runs.append((layer, layer + 1))
    return runs
