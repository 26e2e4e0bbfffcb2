"""The end that asks: batches of reads and writes over a fixed number of connections.

A large batch is striped over all connections, a small one is one frame on one of them. A connection on which anything went wrong
is closed before the batch returns, so no late byte lands in a buffer that its owner has back; the next batch connects anew.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, TypeAlias

from moonpool.errors import (
    ChecksumMismatch,
    ConnectionLost,
    DeadlineExceeded,
    MoonpoolError,
    PoolClosed,
    ProtocolError,
    WireError,
)
from moonpool.transfer import frames
from moonpool.transfer.base import Op, Result, check
from moonpool.transfer.frames import Kind, Status
from moonpool.transfer.registry import Span, bytes_of, span_name
from moonpool.transfer.stream import Stream, stream_of

_STRIPE_FROM = 1 << 20
"""Bytes; a smaller batch is over before a second thread would have begun."""
_PIECE = 16 << 20
"""Bytes; a larger op is cut, so that the connections share it."""


_KINDS = {"read": Kind.READ, "write": Kind.WRITE}


class _Piece(NamedTuple):
    kind: Kind
    op: int
    """Its index in the batch."""
    span: Span
    local: memoryview


Outcome: TypeAlias = list[MoonpoolError | None]
"""One per piece of a share; None is success."""


class TransferClient:
    """`connect` gives a connected, authenticated stream socket to the same peer each time, and bounds its own time."""

    def __init__(self, connect: Callable[[], socket.socket], *, streams: int = 2) -> None:
        self._links = _Links(connect, streams)
        self._streams = streams
        self._helpers = ThreadPoolExecutor(max(streams - 1, 1), thread_name_prefix="transfer")

    def run(self, ops: Sequence[Op], *, timeout: float, checksum: bool = False) -> list[Result]:
        """See `Transport.run`."""
        check(ops)
        deadline = time.monotonic() + timeout
        shares = _shares(ops, self._streams)
        later: list[Future[Outcome]] = []
        try:
            later += [self._helpers.submit(self._run_share, share, deadline, checksum) for share in shares[1:]]
            outcomes = [self._run_share(share, deadline, checksum) for share in shares[:1]]
        except RuntimeError:  # the helpers are shut down
            raise PoolClosed("the transfer client is closed") from None
        finally:
            wait(later)  # whatever happened here, nobody touches the buffers any more
        outcomes += [future.result() for future in later]
        return _per_op(ops, shares, outcomes)

    def close(self) -> None:
        """Cut what is under way (its ops end as PoolClosed or ConnectionLost) and give everything up. Idempotent."""
        self._links.close()
        self._helpers.shutdown()

    def __enter__(self) -> TransferClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_share(self, share: list[_Piece], deadline: float, checksum: bool) -> Outcome:
        """One result per piece; None is success. Never raises what a peer or the network can cause."""
        done: Outcome = []
        try:
            stream = self._links.take(deadline)
        except MoonpoolError as e:
            return [e] * len(share)
        try:
            stream.deadline = deadline
            for kind, pieces in _frames(share):
                done += _exchange(stream, kind, pieces, checksum)
        except WireError as e:
            self._links.drop(stream)
            return done + [e] * (len(share) - len(done))
        except BaseException:
            self._links.drop(stream)
            raise
        self._links.give_back(stream)
        return done


def _shares(ops: Sequence[Op], streams: int) -> list[list[_Piece]]:
    """The batch cut into one share for each connection, about equal in bytes. Reads come before writes in each."""
    pieces = [
        piece for kind in ("read", "write") for i, op in enumerate(ops) if op.kind == kind for piece in _cut(i, op)
    ]
    total = sum(p.span.size for p in pieces)
    if total < _STRIPE_FROM or streams == 1:
        return [pieces] if pieces else []
    shares: list[list[_Piece]] = [[] for _ in range(streams)]
    before = 0
    for piece in pieces:
        shares[min(before * streams // total, streams - 1)].append(piece)
        before += piece.span.size
    return [share for share in shares if share]


def _cut(index: int, op: Op) -> Iterator[_Piece]:
    local = bytes_of(op.local)
    for start in range(0, max(len(local), 1), _PIECE):
        part = local[start : start + _PIECE]
        yield _Piece(_KINDS[op.kind], index, Span(op.region, op.generation, op.offset + start, len(part)), part)


def _per_op(ops: Sequence[Op], shares: list[list[_Piece]], outcomes: list[Outcome]) -> list[Result]:
    """An op is done when all its pieces are; otherwise its result is the first error."""
    results: list[Result] = [op.local.nbytes for op in ops]
    for share, outcome in zip(shares, outcomes, strict=True):
        for piece, error in zip(share, outcome, strict=True):
            if error is not None and isinstance(results[piece.op], int):
                results[piece.op] = error
    return results


def _frames(share: list[_Piece]) -> Iterator[tuple[Kind, list[_Piece]]]:
    """The share in frames of one kind, within the caps."""
    frame: list[_Piece] = []
    size = 0
    for piece in share:
        full = len(frame) == frames.MAX_OPS or size + piece.span.size > frames.MAX_BYTES
        if frame and (full or piece.kind is not frame[0].kind):
            yield frame[0].kind, frame
            frame, size = [], 0
        frame.append(piece)
        size += piece.span.size
    if frame:
        yield frame[0].kind, frame


def _exchange(stream: Stream, kind: Kind, pieces: list[_Piece], checksum: bool) -> Outcome:
    """One frame and its answer. Raises WireError when the connection is of no more use."""
    spans = [p.span for p in pieces]
    locals_ = [p.local for p in pieces]
    request = frames.header(kind, checksum, len(spans), sum(s.size for s in spans)) + frames.spans_table(spans)
    if kind is Kind.WRITE:
        sums = frames.checksums(locals_) if checksum else b""
        stream.send_unchanging([request, *locals_, sums])  # `run` returns when the peer has answered
    else:
        stream.send([request])
    outcome, total = _answer(stream, pieces, checksum)
    if kind is Kind.READ:
        return _receive(stream, pieces, outcome, total, checksum)
    if total:
        raise ProtocolError("bytes after the answer to a write")
    return outcome


def _answer(stream: Stream, pieces: list[_Piece], checksum: bool) -> tuple[Outcome, int]:
    """The peer's verdict on each piece, and how many bytes follow."""
    data = bytearray(frames.HEADER.size)
    stream.receive([memoryview(data)])
    header = frames.parse_header(data)
    if (header.kind, header.items, header.checksums) != (Kind.DONE, len(pieces), checksum):
        raise ProtocolError("the answer does not fit the request")
    table = bytearray(header.table_bytes)
    stream.receive([memoryview(table)])
    outcome: Outcome = []
    for piece, (status, size) in zip(pieces, frames.parse_results(table), strict=True):
        if status != Status.OK:
            outcome.append(frames.error_of(status, span_name(piece.span)))
        elif size != piece.span.size:  # neither less nor more is success
            raise ProtocolError("wrong size", key=span_name(piece.span), need=f"{piece.span.size} B", have=f"{size} B")
        else:
            outcome.append(None)
    return outcome, header.total


def _receive(stream: Stream, pieces: list[_Piece], outcome: Outcome, total: int, checksum: bool) -> Outcome:
    good = [p for p, error in zip(pieces, outcome, strict=True) if error is None]
    size = sum(p.span.size for p in good)
    if size != total:
        raise ProtocolError("the answer's size is not that of its parts", need=f"{size} B", have=f"{total} B")
    stream.receive([p.local for p in good])
    if not checksum:
        return outcome
    sums = bytearray(8 * len(good))
    stream.receive([memoryview(sums)])
    damaged = {
        id(piece)
        for piece, expected in zip(good, frames.parse_checksums(sums), strict=True)
        if frames.checksum(piece.local) != expected
    }
    return [
        ChecksumMismatch("other bytes arrived than were sent", key=span_name(p.span)) if id(p) in damaged else error
        for p, error in zip(pieces, outcome, strict=True)
    ]


class _Links:
    """At most `limit` connections, made when they are wanted. A failure to connect is not remembered."""

    def __init__(self, connect: Callable[[], socket.socket], limit: int) -> None:
        self._connect, self._limit = connect, limit
        self._changed = threading.Condition()
        self._idle: list[Stream] = []
        self._busy: set[Stream] = set()
        self._count = 0
        """Idle, busy, and those that are being made."""
        self._closed = False

    def take(self, deadline: float) -> Stream:
        """A living connection for this caller alone. Raises PoolClosed, DeadlineExceeded, what `connect` raises."""
        with self._changed:
            self._await_turn(deadline)
            if self._idle:
                stream = self._idle.pop()
                self._busy.add(stream)
                return stream
            self._count += 1
        try:
            stream = stream_of(self._connect())
        except OSError as e:
            self._forget()
            raise ConnectionLost(f"cannot connect: {e.strerror or e}") from e
        except BaseException:
            self._forget()
            raise
        with self._changed:
            self._busy.add(stream)
            closed = self._closed
        if closed:
            self.drop(stream)
            raise PoolClosed("the transfer client is closed")
        return stream

    def give_back(self, stream: Stream) -> None:
        with self._changed:
            if not self._closed:
                self._busy.remove(stream)
                self._idle.append(stream)
                self._changed.notify()
                return
        self.drop(stream)

    def drop(self, stream: Stream) -> None:
        with self._changed:
            self._busy.remove(stream)
        stream.close()
        self._forget()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            for stream in self._busy:
                stream.cancel()
            self._changed.notify_all()
        for stream in idle:
            stream.close()

    def _await_turn(self, deadline: float) -> None:
        """Until there is an idle connection, or room for one. The lock is held."""
        while True:
            if self._closed:
                raise PoolClosed("the transfer client is closed")
            while self._idle and self._idle[-1].stale():  # the peer restarted, or gave us up
                self._idle.pop().close()
                self._count -= 1
            if self._idle or self._count < self._limit:
                return
            left = deadline - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                raise DeadlineExceeded("all connections to the peer are busy", have=str(self._limit))

    def _forget(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify()
