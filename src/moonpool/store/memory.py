"""A messenger's segment as a client reaches it: mapped, or over the network. Both move bytes of spans (offset, size)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from socket import socket
from typing import TypeAlias

from moonpool.errors import MoonpoolError
from moonpool.transfer.base import Op
from moonpool.transfer.client import TransferClient
from moonpool.transfer.copying import copy_all
from moonpool.transfer.segment import Segment
from moonpool.wire.messages import ROW_ALIGN

Span: TypeAlias = tuple[int, int]

_TRANSFER_S = 30.0


class Memory(ABC):
    mapped: bool
    """Views are the segment itself: nothing is copied, and a read lease must stay open as long as they are used."""

    @abstractmethod
    def read(self, spans: Sequence[Span]) -> list[memoryview | MoonpoolError]:
        """Read-only views of these bytes."""

    @abstractmethod
    def read_into(self, spans: Sequence[Span], outs: Sequence[memoryview]) -> list[MoonpoolError | None]:
        """Copy each span into its buffer, which is as large."""

    @abstractmethod
    def writable(self, span: Span) -> memoryview | None:
        """The segment's own bytes, if they can be written to in place."""

    @abstractmethod
    def write(self, spans: Sequence[Span], values: Sequence[memoryview]) -> list[MoonpoolError | None]:
        """Copy each value into its span, which is as large."""

    @abstractmethod
    def close(self) -> None: ...


class MappedMemory(Memory):
    mapped = True

    def __init__(self, segment: Segment) -> None:
        """Takes over `segment`."""
        self.segment = segment

    def read(self, spans: Sequence[Span]) -> list[memoryview | MoonpoolError]:
        return [self.segment.span(*span, readonly=True) for span in spans]

    def read_into(self, spans: Sequence[Span], outs: Sequence[memoryview]) -> list[MoonpoolError | None]:
        copy_all([(out, self.segment.span(*span, readonly=True)) for span, out in zip(spans, outs, strict=True)])
        return [None] * len(spans)

    def writable(self, span: Span) -> memoryview:
        return self.segment.span(*span)

    def write(self, spans: Sequence[Span], values: Sequence[memoryview]) -> list[MoonpoolError | None]:
        copy_all([(self.segment.span(*span), value) for span, value in zip(spans, values, strict=True)])
        return [None] * len(spans)

    def write_row(self, offset: int, values: Sequence[memoryview]) -> None:
        """Copy the values to `offset`, each beginning at the next multiple of ROW_ALIGN."""
        ends = list(accumulate(-(-len(v) // ROW_ALIGN) * ROW_ALIGN for v in values))
        row = self.segment.span(offset, ends[-1])
        copy_all([(row[start : start + len(v)], v) for start, v in zip([0, *ends[:-1]], values, strict=True)])

    def close(self) -> None:
        self.segment.close()


class RemoteMemory(Memory):
    mapped = False

    def __init__(self, connect: Callable[[], socket], region: int, generation: int) -> None:
        self._client = TransferClient(connect)
        self._region, self._generation = region, generation

    def read(self, spans: Sequence[Span]) -> list[memoryview | MoonpoolError]:
        outs = [memoryview(bytearray(size)) for _, size in spans]
        errors = self.read_into(spans, outs)
        return [error or out.toreadonly() for error, out in zip(errors, outs, strict=True)]

    def read_into(self, spans: Sequence[Span], outs: Sequence[memoryview]) -> list[MoonpoolError | None]:
        return self._run([self._op("read", o, out) for (o, _), out in zip(spans, outs, strict=True)])

    def writable(self, span: Span) -> None:
        return None

    def write(self, spans: Sequence[Span], values: Sequence[memoryview]) -> list[MoonpoolError | None]:
        return self._run([self._op("write", o, value) for (o, _), value in zip(spans, values, strict=True)])

    def _op(self, kind: str, offset: int, local: memoryview) -> Op:
        return Op("read" if kind == "read" else "write", self._region, self._generation, offset, local)

    def _run(self, ops: list[Op]) -> list[MoonpoolError | None]:
        moved = [op for op in ops if len(op.local)]
        results = iter(self._client.run(moved, timeout=_TRANSFER_S) if moved else [])
        outcomes = [next(results) if len(op.local) else 0 for op in ops]
        return [outcome if isinstance(outcome, MoonpoolError) else None for outcome in outcomes]

    def close(self) -> None:
        self._client.close()
