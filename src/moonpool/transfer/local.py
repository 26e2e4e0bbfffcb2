"""Transfers within one machine: both ends see the same memory, so a transfer is a copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from moonpool.errors import ChecksumMismatch, ConnectionLost, DeadlineExceeded, MoonpoolError, PoolClosed, TransferError
from moonpool.transfer.base import Op, Result, check
from moonpool.transfer.frames import checksum as sum_of
from moonpool.transfer.registry import Found, Piece, Registry, Span, bytes_of


class LocalTransfer:
    """A `Transport` onto a registry of this process; its regions may be mappings of another process's segment.

    A region that is given up waits for the copy that runs and refuses the next.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._closed = threading.Event()

    def run(self, ops: Sequence[Op], *, timeout: float, checksum: bool = False) -> list[Result]:
        """See `Transport.run`."""
        check(ops)
        deadline = time.monotonic() + timeout
        if self._closed.is_set():
            closed = PoolClosed("the transport is closed")
            return [closed] * len(ops)
        cancelled = threading.Event()
        spans = [Span(op.region, op.generation, op.offset, op.local.nbytes) for op in ops]
        with self._registry.use(spans, cancelled.set) as use:
            return [
                self._move(op, found, deadline, cancelled, checksum) for op, found in zip(ops, use.found, strict=True)
            ]

    def close(self) -> None:
        self._closed.set()

    def _move(self, op: Op, found: Found, deadline: float, cancelled: threading.Event, checksum: bool) -> Result:
        if isinstance(found, MoonpoolError):
            return found
        if self._closed.is_set() or cancelled.is_set():
            return ConnectionLost("the transfer was cancelled")
        if time.monotonic() >= deadline:
            return DeadlineExceeded("the transfer took too long")
        return _copy(op, found, checksum)


def _copy(op: Op, piece: Piece, checksum: bool) -> Result:
    local = bytes_of(op.local)
    source, target = (piece.view, local) if op.kind == "read" else (local, piece.view)
    if target.readonly:
        return TransferError("the region can only be read", key=piece.region.name)
    expected = sum_of(source) if checksum else 0
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))  # without the GIL
    if checksum and sum_of(target) != expected:
        return ChecksumMismatch("other bytes arrived than were read", key=piece.region.name)
    return len(local)
