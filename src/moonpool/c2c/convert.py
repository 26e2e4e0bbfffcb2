"""Pages of the source → pages of the target: the converter's arithmetic, without pool, threads or files.

    bf16 pages ─► fp32 x [N, Ls, 2, Ws], keys un-rotated ─► projector ─► fp32 y [N, Lt, 2, Wt] ─► keys rotated ─► bf16 pages

All pages of a call go through together, so each target layer is one matrix product over all their tokens; everything else
is done in blocks of a few pages that stay in the CPU's cache. Rounding to bf16 happens once, to nearest even.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moonpool.c2c import pages as codec
from moonpool.c2c.projectors.base import Projector
from moonpool.c2c.rope import inverse_rotation, rotate_between, rotation
from moonpool.c2c.signature import Difference, ModelSpec, check_contract
from moonpool.errors import ConversionRefused, MoonpoolError, WrongSize

if TYPE_CHECKING:
    from moonpool.c2c.gate import Verdict

_TOKENS_AT_ONCE = 1024
"""Bounds the fp32 intermediates (about 85 MB for a 1.5B source); more tokens make no product faster."""
_BLOCK_TOKENS = 64
"""Tokens that are un-rotated, rotated and checked together: their numbers stay in the second-level cache."""
_INF_BITS = 0x7F80
"""bf16 of this pattern and above, sign apart, is Inf or NaN."""

Page = memoryview | bytes


class _Scratch(threading.local):
    """One fp32 buffer a thread, grown to the largest use: fresh memory of this size would cost a page fault every 4 KiB."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, dtype=np.float32)

    def take(self, *shape: int) -> Tensor:
        """Uninitialised fp32 tensor, valid until this thread's next call."""
        size = int(np.prod(shape))
        if self._buffer.size < size:
            self._buffer = np.empty(size, dtype=np.float32)
        return torch.from_numpy(self._buffer[:size]).view(shape)


_source_numbers, _keys = _Scratch(), _Scratch()


class Conversion:
    """One projector between two models at one page size. Immutable; threads may share it."""

    def __init__(
        self,
        projector: Projector,
        source: ModelSpec,
        target: ModelSpec,
        page_size: int,
        *,
        verdict: Verdict | None = None,
    ) -> None:
        """`verdict`: the gate's on the projector's bundle, if it was asked. Raises ConversionRefused if the projector is not for
        models of these shapes."""
        self.verdict = verdict
        self.source, self.target, self.page_size = source, target, page_size
        self.projector = projector
        self.source_shape, self.target_shape = source.page_shape(page_size), target.page_shape(page_size)
        self.source_bytes, self.target_bytes = self.source_shape.nbytes, self.target_shape.nbytes
        self._read = _runs(projector.source_layers())
        self._pages_at_once = max(1, _TOKENS_AT_ONCE // page_size)
        self._pages_per_block = max(1, _BLOCK_TOKENS // page_size)
        _check_fit(projector, source, target)

    def run(
        self, pages: Sequence[Page], indices: Sequence[int], outs: Sequence[memoryview]
    ) -> list[MoonpoolError | None]:
        """Convert `pages[i]`, the `indices[i]`-th page of its sequence, into `outs[i]`. One result per page: None, or why this
        page was refused (WrongSize; ConversionRefused for NaN or Inf), in which case its `out` is not to be used."""
        jobs = list(zip(pages, indices, outs, strict=True))
        errors = [self._size_error(page, out) for page, _, out in jobs]
        good = [i for i, e in enumerate(errors) if e is None]
        with torch.inference_mode():
            for start in range(0, len(good), self._pages_at_once):
                group = good[start : start + self._pages_at_once]
                for i, why in self._run_group([jobs[i] for i in group]).items():
                    page = indices[group[i]]
                    errors[group[i]] = ConversionRefused(why, key=self.source.name, have=f"page {page}")
        return errors

    def _size_error(self, page: Page, out: memoryview) -> MoonpoolError | None:
        if len(page) != self.source_bytes:
            need, have = f"{self.source_bytes} B ({self.source_shape})", f"{len(page)} B"
            return WrongSize("source page of the wrong size", key=self.source.name, need=need, have=have)
        if len(out) != self.target_bytes:
            need, have = f"{self.target_bytes} B ({self.target_shape})", f"{len(out)} B"
            return WrongSize("target page of the wrong size", key=self.target.name, need=need, have=have)
        return None

    def _run_group(self, jobs: Sequence[tuple[Page, int, memoryview]]) -> dict[int, str]:
        """Convert all; returns place → reason for the pages whose source or result is not finite."""
        size, bad = self.page_size, dict[int, str]()
        blocks = [slice(b, b + self._pages_per_block) for b in range(0, len(jobs), self._pages_per_block)]
        shape = self.source_shape
        x = _source_numbers.take(shape.layers, len(jobs) * size, 2, shape.heads, shape.dim).transpose(0, 1)
        for block in blocks:
            for i, (page, _, _) in enumerate(jobs[block]):
                if not _finite(page):
                    bad[block.start + i] = "source page holds NaN or Inf"
            halves = [codec.unpack(page, self.source_shape) for page, _, _ in jobs[block]]
            at = positions([index for _, index, _ in jobs[block]], size)
            k, v = _join([k for k, _ in halves]), _join([v for _, v in halves])
            self._prepare(k, v, at, x[_rows(block, size)], _keys.take(*k.shape))
        y = self._project(x)
        for block in blocks:
            at = positions([index for _, index, _ in jobs[block]], size)
            rows = y[_rows(block, size)]
            keys = self._finish_keys(rows[:, :, 0], at, _keys.take(*rows[:, :, 0].shape))
            for i, (_, _, out) in enumerate(jobs[block]):
                mine = _rows(slice(i, i + 1), size)
                codec.pack_into(out, keys[mine], rows[mine, :, 1])
                if not _finite(out):
                    bad.setdefault(block.start + i, "the projector's result is not finite")
        return bad

    def project_kv(self, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        """`k`, `v` as stored, `[N, Ls, heads, dim]`, at absolute positions `at` → fp32 `[N, Lt, 2, heads, dim]`, keys rotated for
        the target, not yet rounded."""
        x = torch.empty(k.shape[0], self.source_shape.layers, 2, *k.shape[2:])
        self._prepare(k, v, at, x, torch.empty(k.shape))
        y = self._project(x)
        return torch.stack([self._finish_keys(y[:, :, 0], at, None), y[:, :, 1]], 2)

    def _prepare(self, k: Tensor, v: Tensor, at: Tensor, x: Tensor, stored: Tensor) -> None:
        """Fill the layers of `x` that the projector reads; `stored` is fp32 room of the shape of `k`."""
        content = self.projector.key_space == "content"
        turn = inverse_rotation(at, self.source.rope) if content else None
        for first, last in self._read:
            x[:, first:last, 1].copy_(v[:, first:last])
            if turn is None:
                x[:, first:last, 0].copy_(k[:, first:last])
            else:
                turn.apply(stored[:, first:last].copy_(k[:, first:last]), out=x[:, first:last, 0])

    def _project(self, x: Tensor) -> Tensor:
        shape = self.target_shape
        y = self.projector.project(x.flatten(3))
        return y.view(x.shape[0], shape.layers, 2, shape.heads, shape.dim)

    def _finish_keys(self, k: Tensor, at: Tensor, room: Tensor | None) -> Tensor:
        """Projected keys `[N, Lt, heads, dim]` as the target stores them, in `room` or in new memory or where they were."""
        match self.projector.key_space:
            case "content":
                return rotation(at, self.target.rope).apply(k, out=room)
            case "invariant":
                return rotate_between(k, at, self.source.rope, self.target.rope)
            case "rotated":
                return k


def _check_fit(projector: Projector, source: ModelSpec, target: ModelSpec) -> None:
    for role, shape, spec in (("source", projector.source_shape, source), ("target", projector.target_shape, target)):
        check_contract(f"the projector's {role} shape", _unlike("layers, width", shape, _shape(spec)))
    if projector.key_space == "invariant":
        check_contract("heads that are taken over as they are", _unlike("head_dim", source.head_dim, target.head_dim))
    if projector.target_head_dim:
        check_contract("the projector's target", _unlike("head_dim", projector.target_head_dim, target.head_dim))


def _shape(spec: ModelSpec) -> tuple[int, int]:
    return spec.num_layers, spec.num_kv_heads * spec.head_dim


def _unlike(field: str, need: object, have: object) -> list[Difference]:
    return [Difference(field, str(need), str(have))] if need != have else []


def positions(indices: Sequence[int], page_size: int) -> Tensor:
    """Absolute positions of the tokens of these pages, `[len(indices) * page_size]`."""
    starts = torch.tensor(indices, dtype=torch.int64) * page_size
    return (starts[:, None] + torch.arange(page_size)).flatten()


def _rows(pages: slice, page_size: int) -> slice:
    return slice(pages.start * page_size, pages.stop * page_size)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _finite(page: Page) -> bool:
    """Whether no bf16 number of a page is NaN or Inf: the largest bit pattern tells, once for each sign. On 16-bit integers
    this is several times faster than any test on floats."""
    positive, negative = np.frombuffer(page, dtype=np.int16).max(), np.frombuffer(page, dtype=np.uint16).max()
    return bool(positive < _INF_BITS and negative < _INF_BITS | 0x8000)


def _runs(layers: list[int]) -> list[tuple[int, int]]:
    """Neighbouring layers as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer:
            runs[-1] = (runs[-1][0], layer + 1)
        else:
            runs.append((layer, layer + 1))
    return runs
