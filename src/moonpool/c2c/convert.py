"""Pages of the source → pages of the target: the converter's arithmetic, without pool, threads or files.

    bf16 pages ─► fp32 x [N, Ls, 2, Ws], keys un-rotated ─► projector ─► fp32 y [N, Lt, 2, Wt] ─► keys rotated ─► bf16 pages

Each thread takes pages of its own all the way, some hundred tokens at once: enough for matrix products at full speed, and no
thread waits for another between two steps. What is not a product is done a page at a time: it is read from memory once, in
order, turned in the CPU's cache and written once. Rounding to bf16 happens once, to nearest even.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moonpool.c2c import pages as codec
from moonpool.c2c.projectors.base import Projector
from moonpool.c2c.rope import Rotation, inverse_rotation, rotate_between, rotation
from moonpool.c2c.signature import Difference, ModelSpec, check_contract
from moonpool.errors import ConversionRefused, MoonpoolError, WrongSize

if TYPE_CHECKING:
    from moonpool.c2c.gate import Verdict

_TOKENS_AT_ONCE = 512
"""Bounds a thread's fp32 intermediates (about 45 MB for a 1.5B source); more tokens make products hardly faster."""
_FEWEST_TOKENS = 256
"""Fewer are not worth a thread: each reads all weights."""
_BLOCK_TOKENS = 16
"""Tokens that are un-rotated, rotated and checked together: their numbers stay in the second-level cache."""
_INF_BITS = 0x7F80
"""bf16 of this pattern and above, sign apart, is Inf or NaN."""

Page = memoryview | bytes
Job = tuple[Page, int, memoryview]
"""A source page, its index in its sequence, and where the target's page goes."""


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


_source_numbers, _stored, _turned = _Scratch(), _Scratch(), _Scratch()


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
        self._invariant = projector.key_space == "invariant"
        self._read = _runs(projector.source_layers())
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
        groups = _groups(good, self.page_size)
        found = _each(self._run_group, [[jobs[i] for i in group] for group in groups])
        for group, refused in zip(groups, found, strict=True):
            for i, why in refused.items():
                errors[group[i]] = ConversionRefused(why, key=self.source.name, have=f"page {indices[group[i]]}")
        return errors

    def _size_error(self, page: Page, out: memoryview) -> MoonpoolError | None:
        if len(page) != self.source_bytes:
            need, have = f"{self.source_bytes} B ({self.source_shape})", f"{len(page)} B"
            return WrongSize("source page of the wrong size", key=self.source.name, need=need, have=have)
        if len(out) != self.target_bytes:
            need, have = f"{self.target_bytes} B ({self.target_shape})", f"{len(out)} B"
            return WrongSize("target page of the wrong size", key=self.target.name, need=need, have=have)
        return None

    @torch.inference_mode()
    def _run_group(self, jobs: Sequence[Job]) -> dict[int, str]:
        """Convert all; returns place → reason for the pages whose source or result is not finite."""
        size, shape, bad = self.page_size, self.source_shape, dict[int, str]()
        blocks = [slice(b, b + self._pages_per_block) for b in range(0, len(jobs), self._pages_per_block)]
        at = positions([index for _, index, _ in jobs], size)
        off, on = self._turns(at)
        x = _source_numbers.take(len(jobs) * size, shape.layers, 2, shape.heads, shape.dim)
        for block in blocks:
            for i, (page, _, _) in enumerate(jobs[block]):
                if not _finite(page):
                    bad[block.start + i] = "source page holds NaN or Inf"
            halves = [codec.unpack(page, shape) for page, _, _ in jobs[block]]
            k, v = _join([k for k, _ in halves]), _join([v for _, v in halves])
            rows = _rows(block, size)
            self._prepare(k, v, off and off.rows(rows), x[rows])
        y = self._project(x)
        for block in blocks:
            rows = _rows(block, size)
            keys, values = self._finish_keys(y[rows, :, 0], at[rows], on and on.rows(rows)), y[rows, :, 1]
            for i, (_, _, out) in enumerate(jobs[block]):
                mine = _rows(slice(i, i + 1), size)
                codec.pack_into(out, keys[mine], values[mine])
                if not _finite(out):
                    bad.setdefault(block.start + i, "the projector's result is not finite")
        return bad

    def project_kv(self, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        """`k`, `v` as stored, `[N, Ls, heads, dim]`, at absolute positions `at` → fp32 `[N, Lt, 2, heads, dim]`, keys rotated for
        the target, not yet rounded."""
        x = torch.empty(k.shape[0], self.source_shape.layers, 2, *k.shape[2:])
        off, on = self._turns(at)
        self._prepare(k, v, off, x)
        y = self._project(x)
        return torch.stack([self._finish_keys(y[:, :, 0], at, on), y[:, :, 1]], 2)

    def _turns(self, at: Tensor) -> tuple[Rotation | None, Rotation | None]:
        """What takes the source's rotation off keys at positions `at` and what puts the target's on, where both are done."""
        if self.projector.key_space != "content":
            return None, None
        return inverse_rotation(at, self.source.rope), rotation(at, self.target.rope)

    def _prepare(self, k: Tensor, v: Tensor, turn: Rotation | None, x: Tensor) -> None:
        """Fill the layers of `x` that the projector reads; `turn` takes the keys' rotation off."""
        for first, last in self._read:
            x[:, first:last, 1].copy_(v[:, first:last])
            if turn is None:
                x[:, first:last, 0].copy_(k[:, first:last])
            else:
                x[:, first:last, 0].copy_(_turn(turn, k[:, first:last]))

    def _project(self, x: Tensor) -> Tensor:
        shape = self.target_shape
        y = self.projector.project(x.flatten(3))
        return y.view(x.shape[0], shape.layers, 2, shape.heads, shape.dim)

    def _finish_keys(self, k: Tensor, at: Tensor, turn: Rotation | None) -> Tensor:
        """Projected keys `[N, Lt, heads, dim]` as the target stores them; scratch, new memory, or where they were."""
        if turn is not None:
            return _turn(turn, k)
        return rotate_between(k, at, self.source.rope, self.target.rope) if self._invariant else k


def _turn(turn: Rotation, k: Tensor) -> Tensor:
    """Turned keys in fp32 scratch, valid until this thread's next call. They come and go in order: a rotation goes four times
    through its numbers, which costs twice as much on lines of memory that others lie between."""
    return turn.apply(_stored.take(*k.shape).copy_(k), out=_turned.take(*k.shape))


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


def _groups(pages: list[int], page_size: int) -> list[list[int]]:
    """Shares of the pages, as even as can be: as many for every thread, and none too large or too small."""
    tokens, threads = len(pages) * page_size, torch.get_num_threads()
    count = max(min(threads, tokens // _FEWEST_TOKENS), -(-tokens // _TOKENS_AT_ONCE))
    count = count if count <= threads else -(-count // threads) * threads
    bounds = [len(pages) * i // max(count, 1) for i in range(count + 1)]
    return [pages[a:b] for a, b in itertools.pairwise(bounds) if a < b]


def _each(work: Callable[[Sequence[Job]], dict[int, str]], groups: list[list[Job]]) -> Iterable[dict[int, str]]:
    """`work` on every group, in as many threads as torch may use here."""
    threads = torch.get_num_threads()
    return map(work, groups) if min(threads, len(groups)) < 2 else _helpers(threads).map(work, groups)


@functools.cache
def _helpers(threads: int) -> ThreadPoolExecutor:
    """Threads of this process, made once, as torch's own are, and in which torch does not fork.

    torch's setting belongs to a thread, and is also what later threads start with: hence it is put back.
    """
    pool = ThreadPoolExecutor(threads, "c2c-convert", initializer=lambda: torch.set_num_threads(1))
    ready = threading.Barrier(threads + 1)
    for _ in range(threads):
        pool.submit(ready.wait)
    ready.wait()
    torch.set_num_threads(threads)
    return pool


os.register_at_fork(after_in_child=_helpers.cache_clear)
