"""What every transport offers, and the checks that do not depend on how the bytes move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from moonpool.errors import MoonpoolError, Overlap, TransferError
from moonpool.transfer.registry import address_of


class Op(NamedTuple):
    """Move `len(local)` bytes between the peer's registered memory and `local` (format B; writable for a read)."""

    kind: Literal["read", "write"]
    region: int
    """Id of the peer's region; registry.BY_ADDRESS (0) if `offset` is an absolute address."""
    generation: int
    offset: int
    local: memoryview


Result: TypeAlias = int | MoonpoolError
"""Bytes moved, always the whole op; or why not. After an error the content of a read's `local` is undefined."""


class Transport(Protocol):
    """Safe to use from several threads."""

    def run(self, ops: Sequence[Op], *, timeout: float, checksum: bool = False) -> list[Result]:
        """One result per op, in order, within `timeout` seconds for all. Nothing touches `local` after the return.

        Raises Overlap, TransferError for a batch that means nothing; then nothing was moved.
        """

    def close(self) -> None: ...


def check(ops: Sequence[Op]) -> None:
    """Refuse a batch whose outcome would depend on the order of its parts. Raises Overlap, TransferError."""
    ranges = []
    for op in ops:
        if op.kind == "read" and op.local.readonly:
            raise TransferError("cannot read into read-only memory", key=f"offset {op.offset}")
        start = address_of(op.local)
        if op.local.nbytes:
            ranges.append((start, start + op.local.nbytes, op.kind == "read"))
    _refuse_overlap(ranges, "destinations, or a destination and a source, share memory")
    _refuse_remote_overlap(ops)


def _refuse_remote_overlap(ops: Sequence[Op]) -> None:
    regions: dict[tuple[int, int], list[tuple[int, int, bool]]] = {}
    if any(op.kind == "write" for op in ops):
        for op in ops:
            span = (op.offset, op.offset + op.local.nbytes, op.kind == "write")
            regions.setdefault((op.region, op.generation), []).append(span)
    for ranges in regions.values():
        _refuse_overlap(ranges, "two ops write the same memory of the peer, or one reads what another writes")


def _refuse_overlap(ranges: list[tuple[int, int, bool]], what: str) -> None:
    """`ranges` are (start, end, is written). Two may share bytes only if neither is written."""
    ranges.sort()
    end, written_end = 0, 0
    for start, stop, written in ranges:
        if start < (end if written else written_end):
            raise Overlap(what, key=f"[{start:#x}, {stop:#x})")
        end = max(end, stop)
        written_end = max(written_end, stop) if written else written_end
