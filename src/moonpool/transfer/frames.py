"""What peers say to each other about a batch. Little-endian; every count is checked before memory is taken for it.

    request   magic u16 | version u8 | kind u8 | flags u32 | count u32 | 0 u32 | total u64       READ or WRITE
              count × (region u64 | generation u64 | offset u64 | size u64)
              WRITE: the bytes of all spans in order, `total` of them; then checksums if flagged
    reply     the same header with kind DONE; total = bytes that follow the table
              count × (status u64 | detail u64)
              READ: the bytes of the spans whose status is OK, in order; then their checksums if flagged

A checksum is xxh3_64 of one span's bytes, u64. A peer that breaks these rules is not answered: the connection ends.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

import xxhash

from moonpool.errors import (
    ChecksumMismatch,
    FrameTooLarge,
    MoonpoolError,
    NotRegistered,
    ProtocolError,
    StaleRegion,
    TransferError,
)
from moonpool.transfer.registry import Span

VERSION = 1
MAX_OPS = 4096
"""Spans in one frame: a table of 128 KiB."""
MAX_BYTES = 1 << 36
"""Payload of one frame. It goes straight into registered memory, so this bounds time, not memory."""
HEADER = struct.Struct("<HBBIIIQ")
_MAGIC = 0x544D
_SPAN = struct.Struct("<QQQQ")
_RESULT = struct.Struct("<QQ")
CHECKSUMS = 1


class Kind(IntEnum):
    READ = 1
    WRITE = 2
    DONE = 3


class Status(IntEnum):
    OK = 0
    """`detail` is the number of bytes."""
    NOT_REGISTERED = 1
    STALE = 2
    READ_ONLY = 3
    DAMAGED = 4


class Header(NamedTuple):
    kind: Kind
    checksums: bool
    items: int
    total: int

    @property
    def table_bytes(self) -> int:
        return self.items * (_RESULT.size if self.kind is Kind.DONE else _SPAN.size)


def header(kind: Kind, checksums: bool, count: int, total: int) -> bytes:
    return HEADER.pack(_MAGIC, VERSION, kind, CHECKSUMS if checksums else 0, count, 0, total)


def parse_header(data: bytearray) -> Header:
    """Raises ProtocolError (not ours, other version, nonsense), FrameTooLarge."""
    magic, version, kind, flags, count, zero, total = HEADER.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError("not a Moonpool transfer", fix="Is something else using this socket?")
    if version != VERSION:
        raise ProtocolError("peer speaks another version", need=str(VERSION), have=str(version), fix="Run one version.")
    if kind not in Kind.__members__.values() or flags & ~CHECKSUMS or zero:
        raise ProtocolError("unknown kind of transfer", have=f"kind {kind}, flags {flags}")
    if count > MAX_OPS:
        raise FrameTooLarge("too many spans in one frame", need=f"<= {MAX_OPS}", have=str(count))
    if total > MAX_BYTES:
        raise FrameTooLarge("too many bytes in one frame", need=f"<= {MAX_BYTES} B", have=f"{total} B")
    return Header(Kind(kind), bool(flags), count, total)


def spans_table(spans: Sequence[Span]) -> bytes:
    return struct.pack(f"<{4 * len(spans)}Q", *chain.from_iterable(spans))


def parse_spans(table: bytearray, total: int) -> list[Span]:
    """Raises ProtocolError if the sizes do not add up to `total`."""
    spans = [Span(*fields) for fields in _SPAN.iter_unpack(table)]
    if sum(span.size for span in spans) != total:
        raise ProtocolError("sizes of the spans do not add up", need=f"{total} B")
    return spans


def results_table(results: Sequence[tuple[Status, int]]) -> bytes:
    return struct.pack(f"<{2 * len(results)}Q", *chain.from_iterable(results))


def parse_results(table: bytearray) -> list[tuple[int, int]]:
    return list(_RESULT.iter_unpack(table))


def checksum(view: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(view)


def checksums(views: Sequence[memoryview]) -> bytes:
    return struct.pack(f"<{len(views)}Q", *map(checksum, views))


def parse_checksums(table: bytearray) -> tuple[int, ...]:
    return struct.unpack(f"<{len(table) // 8}Q", table)


def status_of(error: MoonpoolError) -> Status:
    match error:
        case StaleRegion():
            return Status.STALE
        case ChecksumMismatch():
            return Status.DAMAGED
        case NotRegistered():
            return Status.NOT_REGISTERED
        case _:
            return Status.READ_ONLY


def error_of(status: int, name: str) -> MoonpoolError:
    """What the peer's status means, as an error about the span called `name`."""
    match status:
        case Status.NOT_REGISTERED:
            return NotRegistered("not, or only partly, registered memory of the peer", key=name)
        case Status.STALE:
            return StaleRegion(
                "the peer gave the region up since", key=name, fix="Ask it for the region's present name."
            )
        case Status.READ_ONLY:
            return TransferError("the peer's region can only be read", key=name)
        case Status.DAMAGED:
            return ChecksumMismatch("the peer received other bytes than were sent", key=name)
        case _:
            return ProtocolError("unknown status", key=name, have=str(status))
