"""From stored objects to tensors: an object as it is, or a tensor put together from its pieces.

Which pieces there are the store does not say: their number stands in a manifest and in each piece's header. Either may be
damaged or of another writer, so each is only a place to look; what counts is that all pieces name one and the same tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from moonpool.integrations.mooncake_api.tensors import codec, layout
from moonpool.integrations.mooncake_api.tensors.header import DTYPES, SIZE, Bytes, Header, Shape, parse, parse_manifest
from moonpool.integrations.mooncake_api.tensors.layout import AxisSpec, Partition, Refusal, Spec
from moonpool.integrations.mooncake_api.tensors.raw import RawStore, fetch, memory_at, refuse

if TYPE_CHECKING:
    import torch


class Destination(Protocol):
    """Where a tensor is read to."""

    def fetch(self, store: RawStore, key: str) -> Bytes | None:
        """A whole object, None if it is missing (or does not fit)."""

    def room(self, size: int) -> Bytes:
        """Memory for an object of `size` bytes. Raises Refusal if there is not that much."""


class Fresh(Destination):
    """Memory of its own for each tensor."""

    def fetch(self, store: RawStore, key: str) -> Bytes | None:
        return fetch(store, [key])[0]

    def room(self, size: int) -> Bytes:
        return np.empty(size, np.uint8)


class Into(Destination):
    """The caller's buffer; the tensor that comes back is a view of it. What a failed read leaves in it is not defined."""

    def __init__(self, ptr: int, size: int) -> None:
        self._ptr, self._size = ptr, size

    def fetch(self, store: RawStore, key: str) -> Bytes | None:
        self.room(0)
        return fetch_into(store, [key], [self._ptr], [self._size])[0]

    def room(self, size: int) -> Bytes:
        if self._ptr == 0:
            raise Refusal("the buffer's address is null")
        if size > self._size:
            raise Refusal(f"the tensor needs {size} B, the buffer has {self._size} B")
        return memory_at(self._ptr, size)


def fetch_into(store: RawStore, keys: Sequence[str], ptrs: Sequence[int], sizes: Sequence[int]) -> list[Bytes | None]:
    """Reads each object to its buffer; None where it is missing or does not fit."""
    lengths = store.batch_get_into(keys, ptrs, sizes) if keys else []
    if len(lengths) != len(keys):  # a store that is not set up
        return [None] * len(keys)
    return [memory_at(ptr, length) if length >= 0 else None for ptr, length in zip(ptrs, lengths, strict=True)]


class Source(NamedTuple):
    header: Header
    data: Bytes


def read_target(store: RawStore, key: str, target: object, to: Destination) -> torch.Tensor | None:
    """What a ReadTarget asks for, None (and a line in the log) if it is not there."""
    try:
        mode, spec = layout.parse_target(target)
        if mode == "as_stored":
            return codec.read(to.fetch(store, key))
        if spec is None:
            joined = _join_parts(store, key, to)
            return codec.read(to.fetch(store, key)) if joined is None else joined
        return _read_shard(store, key, spec, to) if mode == "shard" else _read_full(store, key, spec, to)
    except Refusal as e:
        refuse(str(e), key)
        return None


def _read_shard(store: RawStore, key: str, spec: Spec, to: Destination) -> torch.Tensor | None:
    """The piece where it is stored as such, else cut out of the pieces that there are."""
    tp = layout.tp_of(spec)
    for place in _exact_places(key, spec):
        data = to.fetch(store, place)
        header = None if data is None else parse(data)
        if data is not None and header is not None and layout.spec_of(header) == layout.canonical(spec):
            return codec.decode(data, header)
    if tp is None:
        raise Refusal("no piece of that layout")
    sources = next(_complete_sets(store, key, spec, tp), None)
    if sources is None:
        return _unnamed_piece(store, key, spec, to)
    whole = sources[0].header.whole
    shape = layout.shard_shape(whole, tp.split_dim, tp.size)
    header = Header(sources[0].header.dtype, shape, whole, tuple(a.stored() for a in spec), shard=True)
    return _assemble(header, sources, tp.split_dim, tp.rank * shape[tp.split_dim], to)


def _unnamed_piece(store: RawStore, key: str, spec: Spec, to: Destination) -> torch.Tensor | None:
    """An object under the piece's key that does not say which piece it is, from a writer that keeps layouts to itself."""
    data = to.fetch(store, layout.piece_key(key, spec)) if len(spec) == 1 else None
    header = None if data is None else parse(data)
    if data is None or header is None or header.shard:
        raise Refusal("the pieces of that layout are not all there")
    return codec.decode(data, header)


def _exact_places(key: str, spec: Spec) -> Iterator[str]:
    yield layout.piece_key(key, spec)
    tp = layout.tp_of(spec)
    if len(spec) == 1 and tp is not None:
        yield layout.part_key(key, Partition(tp.rank, tp.size, tp.split_dim))


def _read_full(store: RawStore, key: str, spec: Spec, to: Destination) -> torch.Tensor | None:
    tp = layout.tp_of(spec)
    if tp is None:
        raise Refusal("only a tp axis can be put together")
    sources = next(_complete_sets(store, key, spec, tp), None)
    if sources is None:
        raise Refusal("the pieces of that layout are not all there")
    whole = sources[0].header.whole
    layout.shard_shape(whole, tp.split_dim, tp.size)  # the request must name a layout of this tensor
    return _assemble(Header(sources[0].header.dtype, whole, whole), sources, tp.split_dim, 0, to)


def _join_parts(store: RawStore, key: str, to: Destination) -> torch.Tensor | None:
    """The tensor whose parts several writers put; None if they did not, or not all."""
    (manifest,) = [None if m is None else parse_manifest(m) for m in fetch(store, [layout.part_manifest_key(key)])]
    if manifest is None or manifest.pieces > layout.MAX_PIECES:
        return None
    parts = [Partition(rank, manifest.pieces, manifest.split_dim) for rank in range(manifest.pieces)]
    sources = _pieces(store, [layout.part_key(key, p) for p in parts], [p.spec for p in parts])
    if sources is None:
        return None
    header = Header(sources[0].header.dtype, sources[0].header.whole, sources[0].header.whole)
    return _assemble(header, sources, manifest.split_dim, 0, to)


def _complete_sets(store: RawStore, key: str, spec: Spec, tp: AxisSpec) -> Iterator[list[Source]]:
    """The sets of pieces that differ from the request in nothing but how finely tp cuts: by the manifest, by a header."""
    tried: set[int] = set()
    for count in _counts(store, key, spec, tp):
        if count in tried or not 0 < count <= layout.MAX_PIECES:
            continue
        tried.add(count)
        specs = [layout.with_tp(spec, rank, count) for rank in range(count)]
        sources = _pieces(store, [layout.piece_key(key, s) for s in specs], specs)
        if sources is not None:
            yield sources


def _counts(store: RawStore, key: str, spec: Spec, tp: AxisSpec) -> Iterator[int]:
    """In how many pieces the tensor may lie."""
    for data in fetch(store, [layout.manifest_key(key)]):
        manifest = None if data is None else parse_manifest(data)
        if manifest is not None:
            yield manifest.pieces
    if len(spec) > 1:  # the count is part of the key, so only the request's can be asked for
        yield tp.size
        return
    for data in fetch(store, [layout.tp_key(key, 0)]):
        header = None if data is None else parse(data)
        if header is not None and header.tp is not None:
            yield header.tp.pieces


def _pieces(store: RawStore, keys: Sequence[str], specs: Sequence[Spec]) -> list[Source] | None:
    """All pieces, in order, or None unless each is there and they are equal cuts of one tensor, each of its own layout."""
    first = fetch(store, keys[:1])  # a wrong count must not cost a request for thousands of keys
    if first[0] is None:
        return None
    sources: list[Source] = []
    for data, spec in zip(first + fetch(store, keys[1:]), specs, strict=True):
        header = None if data is None else parse(data)
        tp = layout.tp_of(spec)
        if data is None or header is None or tp is None or layout.spec_of(header) != layout.canonical(spec):
            return None
        if not _is_cut(header, tp) or (header.dtype, header.whole) != _identity(
            sources[0].header if sources else header
        ):
            return None
        sources.append(Source(header, data))
    return sources


def _is_cut(header: Header, tp: AxisSpec) -> bool:
    try:
        return header.shape == layout.shard_shape(header.whole, tp.split_dim, tp.size)
    except Refusal:
        return False


def _identity(header: Header) -> tuple[int, Shape]:
    return header.dtype, header.whole


def _assemble(header: Header, sources: Sequence[Source], split_dim: int, start: int, to: Destination) -> torch.Tensor:
    """Copies `header.shape` from position `start` of the whole tensor along `split_dim`; `sources` are all of it, in order."""
    out = to.room(header.total)
    target = _rows(out, header, split_dim)
    size = target.shape[1]
    position = 0
    for source in sources:
        rows = _rows(source.data, source.header, split_dim)
        first, last = max(start, position), min(start + size, position + rows.shape[1])
        if first < last:
            target[:, first - start : last - start] = rows[:, first - position : last - position]
        position += rows.shape[1]
    out[:SIZE] = np.frombuffer(header.pack(), np.uint8)
    return codec.decode(out, header)


def _rows(data: Bytes, header: Header, split_dim: int) -> Bytes:
    """The data as bytes of shape [before, along, after the split dimension × element]."""
    before, after = header.shape[:split_dim], header.shape[split_dim + 1 :]
    row = math.prod(after) * DTYPES[header.dtype][1]
    return data[header.data_offset :].reshape(math.prod(before), header.shape[split_dim], row)
