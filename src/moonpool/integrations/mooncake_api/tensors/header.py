"""The 304 bytes before a tensor's data, as the peer lays them out (little endian), and the 96-byte manifest of a split tensor.

    0    u32 magic, u16 version 1, u16 header size 304, i32 dtype, i32 ndim,
         u32 layout (0 full, 1 shard), u32 flags 0, u64 data offset, u64 data bytes
    40   8 × i64 global shape, 8 × i64 local shape      (unused dimensions are -1)
    168  u32 number of axes, u32 0
    176  4 × axis: i32 kind (dp tp ep pp), i32 position, i32 rank, i32 count, i32 split dimension (-1: none),
         i32 expert or stage, i64 extent along the split dimension

What `parse` returns has been checked against the real length of the object, so that a reader can trust it: no field can send
it outside the bytes or make it take more memory than they are.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""One object's bytes, one-dimensional."""

SIZE = 304
MAX_DIMS = 8
MAX_AXES = 4
MAX_BYTES = (1 << 63) - 1
"""No tensor has more, nor strides that reach further."""

KINDS = ("dp", "tp", "ep", "pp")
"""An axis kind's index here is its code on the wire and its place in a key."""
TP = KINDS.index("tp")

DTYPES = (
    ("float32", 4),
    ("float64", 8),
    ("int8", 1),
    ("uint8", 1),
    ("int16", 2),
    ("uint16", 2),
    ("int32", 4),
    ("uint32", 4),
    ("int64", 8),
    ("uint64", 8),
    ("bool", 1),
    ("float16", 2),
    ("bfloat16", 2),
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
)
"""torch's name and the element's bytes; the index is the code on the wire."""

_MAGIC, _VERSION = 0x4D4F4F4E, 1
_FIXED = struct.Struct("<IHHiiIIQQ8q8qII")
_AXIS = struct.Struct("<iiiiiiq")
_MANIFEST = struct.Struct("<IHHiiiii4x8q")
_MANIFEST_MAGIC = 0x574D414E

Shape: TypeAlias = tuple[int, ...]


class Axis(NamedTuple):
    """How one kind of parallelism cut the tensor, and which piece this is."""

    kind: int
    rank: int
    pieces: int
    split_dim: int = -1
    ident: int = 0
    """The expert (ep) or stage (pp)."""


class Header(NamedTuple):
    """What an object says of its tensor. `shape` is what is stored here, `whole` the shape before it was split."""

    dtype: int
    shape: Shape
    whole: Shape
    axes: tuple[Axis, ...] = ()
    shard: bool = False
    data_offset: int = SIZE

    @property
    def data_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]

    @property
    def total(self) -> int:
        """Bytes of the whole object."""
        return self.data_offset + self.data_bytes

    @property
    def tp(self) -> Axis | None:
        return next((a for a in self.axes if a.kind == TP), None) if self.shard else None

    def pack(self) -> bytes:
        fixed = _FIXED.pack(
            *(
                _MAGIC,
                _VERSION,
                SIZE,
                self.dtype,
                len(self.shape),
                int(self.shard),
                0,
                self.data_offset,
                self.data_bytes,
            ),
            *(*_dims(self.whole), *_dims(self.shape), len(self.axes), 0),
        )
        axes = b"".join(
            _AXIS.pack(
                a.kind, i, a.rank, a.pieces, a.split_dim, a.ident, self.shape[a.split_dim] if a.split_dim >= 0 else 0
            )
            for i, a in enumerate(self.axes)
        )
        return (fixed + axes).ljust(SIZE, b"\0")


def parse(data: Bytes) -> Header | None:
    """The header of an object that is `data`; None if it is no tensor, or damaged, or of another length than it says."""
    if len(data) < SIZE:
        return None
    fields = _FIXED.unpack_from(data.data)
    magic, version, size, dtype, ndim, layout, _flags, offset, data_bytes = fields[:9]
    if (magic, version, size) != (_MAGIC, _VERSION, SIZE) or layout > 1:
        return None
    if not 0 <= dtype < len(DTYPES) or not 0 <= ndim <= MAX_DIMS:
        return None
    whole, shape = _shape(fields[9:17], ndim), _shape(fields[17:25], ndim)
    axes = _axes(data, fields[25], ndim)
    if whole is None or shape is None or axes is None:
        return None
    header = Header(dtype, shape, whole, axes, bool(layout), offset)
    if offset < SIZE or data_bytes != header.data_bytes or offset + data_bytes != len(data):
        return None
    return header


def _axes(data: Bytes, count: int, ndim: int) -> tuple[Axis, ...] | None:
    if count > MAX_AXES:
        return None
    axes = []
    for i in range(count):
        kind, _position, rank, of, split_dim, ident, _extent = _AXIS.unpack_from(
            data.data, _FIXED.size + i * _AXIS.size
        )
        if not 0 <= kind < len(KINDS) or not 0 <= rank < of or not -1 <= split_dim < ndim:
            return None
        axes.append(Axis(kind, rank, of, split_dim, ident))
    return tuple(axes)


def _dims(shape: Shape) -> tuple[int, ...]:
    return shape + (-1,) * (MAX_DIMS - len(shape))


def _shape(dims: tuple[int, ...], ndim: int) -> Shape | None:
    """None unless these are `ndim` sizes and then -1. A size of 0 does not excuse the others: strides multiply them too."""
    shape = dims[:ndim]
    if min(shape, default=0) < 0 or any(d != -1 for d in dims[ndim:]):
        return None
    return shape if math.prod(d for d in shape if d) * 8 <= MAX_BYTES else None


class Manifest(NamedTuple):
    """What the peer stores beside the pieces of a tensor. Only a hint where to look: the pieces' own headers decide."""

    dtype: int
    whole: Shape
    split_dim: int
    pieces: int

    def pack(self) -> bytes:
        return _MANIFEST.pack(
            *(_MANIFEST_MAGIC, _VERSION, _MANIFEST.size, self.dtype, len(self.whole), self.split_dim, self.pieces, 0),
            *_dims(self.whole),
        )


def parse_manifest(data: Bytes) -> Manifest | None:
    if len(data) < _MANIFEST.size:
        return None
    magic, version, size, dtype, ndim, split_dim, count, _zero, *dims = _MANIFEST.unpack_from(data.data)
    if (magic, version, size) != (_MANIFEST_MAGIC, _VERSION, _MANIFEST.size):
        return None
    if not 0 <= split_dim < ndim <= MAX_DIMS or count <= 0 or not 0 <= dtype < len(DTYPES):
        return None
    whole = _shape(tuple(dims), ndim)
    return None if whole is None else Manifest(dtype, whole, split_dim, count)
