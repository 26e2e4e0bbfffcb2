"""From tensors to the objects that are written: whole, or the pieces that a layout asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from moonpool.integrations.mooncake_api.tensors import codec, layout
from moonpool.integrations.mooncake_api.tensors.header import SIZE, TP, Bytes, Header, Manifest, Shape, parse
from moonpool.integrations.mooncake_api.tensors.layout import AxisSpec, Partition, Refusal, Spec
from moonpool.integrations.mooncake_api.tensors.raw import (
    INVALID,
    Config,
    Piece,
    RawStore,
    config_fits,
    for_some,
    memory_at,
    refuse,
    write,
)

if TYPE_CHECKING:
    import torch

PiecesOf: TypeAlias = Callable[[str, Any], list[Piece]]
"""What to write for a key and its value (a tensor, or a buffer that holds one). Raises Refusal."""


def write_each(
    store: RawStore, keys: Sequence[str], values: Sequence[Any], pieces_of: PiecesOf, config: Config, *, replace: bool
) -> list[int]:
    """Writes what `pieces_of` makes of each key and value, all in one go. A key's code is that of its first piece that failed."""
    if len(keys) != len(values):
        return [refuse(f"{len(keys)} keys but {len(values)} tensors")] * len(keys)
    if not config_fits(config, len(keys)):
        return [INVALID] * len(keys)
    results = [0] * len(keys)
    pieces: list[Piece] = []
    owners: list[int] = []
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        try:
            made = pieces_of(key, value)
        except Refusal as e:
            results[i] = refuse(str(e), key)
            continue
        pieces += made
        owners += [i] * len(made)
    for owner, code in zip(owners, write(store, pieces, for_some(config, owners), replace=replace), strict=True):
        results[owner] = results[owner] or code
    return results


def write_requests(
    store: RawStore,
    keys: Sequence[str],
    values: Sequence[Any],
    asked: Sequence[PiecesOf],
    config: Config,
    *,
    replace: bool,
) -> list[int]:
    """Each key by its own request, one after the other: two of them may write the same manifest."""
    if not config_fits(config, len(keys)):
        return [INVALID] * len(keys)
    return [
        write_each(store, [key], [value], pieces_of, for_some(config, [i]), replace=replace)[0]
        for i, (key, value, pieces_of) in enumerate(zip(keys, values, asked, strict=True))
    ]


def write_from(
    store: RawStore, keys: Sequence[str], ptrs: Sequence[int], sizes: Sequence[int], config: Config, *, replace: bool
) -> list[int]:
    """Writes the tensor objects that lie in the callers' buffers. One that holds none refuses the batch, as in the peer."""
    buffers = buffers_at(ptrs, sizes)
    if len(buffers) != len(keys) or any(parse(b) is None for b in buffers):
        return [refuse("needs a buffer for each key that holds a tensor of exactly its size")] * len(keys)
    return write_each(store, keys, buffers, as_it_is, config, replace=replace)


def buffers_at(ptrs: Sequence[int], sizes: Sequence[int]) -> list[Bytes]:
    """The callers' memory. Empty where there is none or it is too small for a tensor, and altogether if the lists do not fit."""
    if len(ptrs) != len(sizes):
        return []
    return [memory_at(p, n if p and n >= SIZE else 0) for p, n in zip(ptrs, sizes, strict=True)]


def whole(key: str, value: object) -> list[Piece]:
    """The tensor as one object."""
    return [Piece(key, codec.encode(codec.storable(value)))]


def as_it_is(key: str, value: Bytes) -> list[Piece]:
    """The buffer itself, which holds header and data already."""
    _header_in(value)
    return [Piece(key, (value,))]


def all_pieces(count: int, split_dim: int) -> PiecesOf:
    """The `count` pieces of a whole tensor (or of the one in a buffer), as `<key>_tp_<rank>`."""
    return lambda key, value: _all_ranks(key, _tensor_in(value), (AxisSpec(TP, 0, count, split_dim),))


def requested(parallelism: object, partition: object) -> PiecesOf:
    """What `put_tensor_with_parallelism` writes. With tp as the only axis the tensor is the piece itself, else it is the whole."""

    def pieces(key: str, value: object) -> list[Piece]:
        tensor = codec.storable(value)
        match asked := _parse_request(parallelism, partition):
            case None:
                return whole(key, tensor)
            case Partition():
                return _writers_part(key, tensor, asked)
            case (AxisSpec(kind=kind) as tp,) if kind == TP:
                return _ready_piece(key, tensor, tp)
        return [_cut(layout.piece_key(key, asked), tensor, asked), *_manifest(key, tensor, asked)]

    return pieces


def requested_of_whole(parallelism: object, partition: object) -> PiecesOf:
    """What `put_tensor_with_parallelism_from` writes: the buffer holds the whole tensor, and every tp piece of it is written."""

    def pieces(key: str, value: Bytes) -> list[Piece]:
        match asked := _parse_request(parallelism, partition):
            case None:
                return as_it_is(key, value)
            case Partition():
                return _writers_part(key, _tensor_in(value), asked)
        if layout.tp_of(asked) is None:
            return [_cut(layout.piece_key(key, asked), _tensor_in(value), asked)]
        return _all_ranks(key, _tensor_in(value), asked)

    return pieces


def _parse_request(parallelism: object, partition: object) -> Spec | Partition | None:
    if partition is None:
        return None if parallelism is None else layout.parse_spec(parallelism)
    if parallelism is not None:
        raise Refusal("writer_partition cannot be combined with parallelism")
    return layout.parse_partition(partition)


def _tensor_in(value: object) -> torch.Tensor:
    """The value if it is a tensor, or the whole tensor whose object a buffer holds. Raises Refusal."""
    if not isinstance(value, np.ndarray):
        return codec.storable(value)
    header = _header_in(value)
    if header.whole != header.shape:
        raise Refusal("the buffer holds a piece already, not a whole tensor")
    return codec.decode(value, header)


def _header_in(value: Bytes) -> Header:
    header = parse(value)
    if header is None:
        raise Refusal("the buffer does not hold a tensor of exactly its size")
    return header


def _all_ranks(key: str, tensor: torch.Tensor, spec: Spec) -> list[Piece]:
    tp = layout.tp_of(spec)
    assert tp is not None
    layout.shard_shape(_shape(tensor), tp.split_dim, tp.size)  # refuses before the first piece is made
    ranks = (layout.with_tp(spec, rank, tp.size) for rank in range(tp.size))
    return [_cut(layout.piece_key(key, s), tensor, s) for s in ranks]


def _cut(key: str, tensor: torch.Tensor, spec: Spec) -> Piece:
    """The piece of a whole tensor that the axes name; only tp cuts, the other axes hold copies."""
    axes = tuple(a.stored() for a in spec)
    tp = layout.tp_of(spec)
    if tp is None:
        return Piece(key, codec.encode(tensor, axes=axes))
    whole_shape = _shape(tensor)
    extent = layout.shard_shape(whole_shape, tp.split_dim, tp.size)[tp.split_dim]
    part = tensor.narrow(tp.split_dim, tp.rank * extent, extent)
    return Piece(key, codec.encode(part, whole=whole_shape, axes=axes))


def _ready_piece(key: str, tensor: torch.Tensor, tp: AxisSpec) -> list[Piece]:
    shape = _shape(tensor)
    if not 0 <= tp.split_dim < len(shape):
        raise Refusal(f"no dimension {tp.split_dim} in shape {list(shape)}")
    full = (*shape[: tp.split_dim], shape[tp.split_dim] * tp.size, *shape[tp.split_dim + 1 :])
    piece = Piece(layout.tp_key(key, tp.rank), codec.encode(tensor, whole=full, axes=(tp.stored(),)))
    manifest = Manifest(codec.code_of(tensor), full, tp.split_dim, tp.size)
    return [piece, _packed(layout.manifest_key(key), manifest)]


def _writers_part(key: str, tensor: torch.Tensor, part: Partition) -> list[Piece]:
    manifest = Manifest(codec.code_of(tensor), _shape(tensor), part.split_dim, part.size)
    piece = _cut(layout.part_key(key, part), tensor, part.spec)
    return [piece, _packed(layout.part_manifest_key(key), manifest)]


def _manifest(key: str, tensor: torch.Tensor, spec: Spec) -> list[Piece]:
    tp = layout.tp_of(spec)
    if tp is None:
        return []
    return [_packed(layout.manifest_key(key), Manifest(codec.code_of(tensor), _shape(tensor), tp.split_dim, tp.size))]


def _packed(key: str, manifest: Manifest) -> Piece:
    return Piece(key, (np.frombuffer(manifest.pack(), np.uint8),))


def _shape(tensor: torch.Tensor) -> Shape:
    return tuple(tensor.shape)
