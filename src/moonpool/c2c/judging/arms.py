"""The ways to fill the target's cache that the evaluator compares: the mapped one, and controls that must be worse.

Every arm but `no_context` keeps the document's own native first page, as the serving path does; so a control tells what the
*other* pages are worth.

    native                 the target's own cache
    mapped, compare        made by the projector(s) from the source's cache, page by page, as the converter does it
    tail16                 mapped, but the last 16 tokens of the prefix computed by the target itself over the mapped cache
    source                 no arm of the target: the source model itself answers, over its own cache
    shuffled_keys          mapped values, under keys that were dealt out anew among the tokens
    first_page             nothing but the native first page
    wrong_document         another document's native cache
    wrong_mapped           another document's mapped cache
    zeros                  keys and values 0
    noise                  random, with the mean and deviation of the native cache per layer, head and dim
    no_context             no cache at all
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moonpool.c2c import pages as codec
from moonpool.c2c.convert import Conversion
from moonpool.c2c.fitting.capture import KV, concat
from moonpool.c2c.projectors.base import Projector
from moonpool.c2c.signature import ModelSpec

MAPPED, COMPARE, NATIVE, NO_CONTEXT, SOURCE = "mapped", "compare", "native", "no_context", "source"
TAIL = 16
"""Tokens that `tail16` computes natively (fewer where the prefix has no more behind its first page)."""


class Mapper:
    """A projector applied as the converter applies it: whole pages, bf16 in and out."""

    def __init__(self, projector: Projector, source: ModelSpec, target: ModelSpec, page_size: int) -> None:
        """Raises ConversionRefused if projector and models do not fit."""
        self.kind = projector.kind
        self._conversion = Conversion(projector, source, target, page_size)
        self._page = page_size

    def map(self, kv: KV) -> KV:
        """Source KV of whole pages from position 0 on → target KV, bf16. Raises ConversionRefused (NaN or Inf)."""
        count = len(kv) // self._page
        parts = [kv[i * self._page : (i + 1) * self._page] for i in range(count)]
        outs = [bytearray(self._conversion.target_bytes) for _ in parts]
        packed = [bytes(codec.pack(p.k, p.v)) for p in parts]
        for error in self._conversion.run(packed, list(range(count)), [memoryview(o) for o in outs]):
            if error is not None:
                raise error
        return concat([KV(*codec.unpack(bytes(o), self._conversion.target_shape)) for o in outs])


@dataclass(frozen=True, slots=True)
class Case:
    """Caches of one document's prefix (whole pages), and of another document's."""

    native: KV
    source: KV
    other_native: KV
    other_source: KV


@dataclass(frozen=True, slots=True)
class Filled:
    """`cache` holds the pages in `[0, len)`; the continuation starts at `start`, behind `tail` tokens of the prefix that the model
    computes first. The source model's cache goes by the name SOURCE, and into no other model."""

    name: str
    cache: KV | None
    start: int
    tail: int = 0


def arms(case: Case, mappers: dict[str, Mapper], page_size: int, seed: int) -> Iterator[Filled]:
    """The native arm first, `no_context` last."""
    length = len(case.native)
    first = case.native[:page_size]

    def behind_first(name: str, kv: KV) -> Filled:
        return Filled(name, concat([first, kv[page_size:length]]), length)

    yield Filled(NATIVE, case.native, length)
    made = {name: mapper.map(case.source) for name, mapper in mappers.items()}
    for name, kv in made.items():
        yield behind_first(name, kv)
    mapped, tail = made[MAPPED], min(TAIL, length - page_size)
    yield Filled("tail16", concat([first, mapped[page_size : length - tail]]), length, tail)
    yield Filled(SOURCE, case.source[:length], length)
    yield behind_first("shuffled_keys", shuffled_keys(mapped, page_size, seed))
    yield Filled("first_page", first, length)
    yield behind_first("wrong_document", case.other_native)
    yield behind_first("wrong_mapped", mappers[MAPPED].map(case.other_source))
    yield behind_first("zeros", KV(torch.zeros_like(case.native.k), torch.zeros_like(case.native.v)))
    yield behind_first("noise", noise(case.native, seed))
    yield Filled(NO_CONTEXT, None, 0)


def shuffled_keys(kv: KV, page_size: int, seed: int) -> KV:
    """The same values under keys that stood at other tokens, those of the first page left out."""
    generator = torch.Generator().manual_seed(seed)
    order = page_size + torch.randperm(len(kv) - page_size, generator=generator)
    return KV(torch.cat([kv.k[:page_size], kv.k[order]]), kv.v)


def noise(kv: KV, seed: int) -> KV:
    """Gaussian with the mean and deviation of `kv` over its tokens, per layer, head and dim, bf16."""
    generator = torch.Generator().manual_seed(seed)

    def like(t: Tensor) -> Tensor:
        t = t.float()
        return t.mean(0) + t.std(0) * torch.randn(t.shape, generator=generator)

    return KV(like(kv.k), like(kv.v)).rounded()
