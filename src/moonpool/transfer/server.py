"""The end that owns the memory: answers READ and WRITE of its peers over connected, authenticated stream sockets."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence

from moonpool.errors import ProtocolError, TransferError, WireError
from moonpool.transfer import frames
from moonpool.transfer.frames import Header, Kind, Status
from moonpool.transfer.registry import Found, Piece, Region, Registry
from moonpool.transfer.stream import Stream, stream_of

log = logging.getLogger(__name__)

IDLE_S = 30.0
"""A peer inside a frame that moves no byte for this long is given up."""
_FILE_FROM = 64 << 10
"""Bytes; below this a copy is cheaper than a sendfile call."""
_SCRATCH = 256 << 10


class TransferServer:
    """One `serve` call, in a thread of its caller's, for each connection. The caller bounds how many there are."""

    def __init__(self, registry: Registry, *, idle_s: float = IDLE_S) -> None:
        self._registry, self._idle_s = registry, idle_s
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._closed = False

    def serve(self, sock: socket.socket) -> None:
        """Answer until the peer closes, breaks the protocol, or `close`. Takes the socket over and closes it."""
        stream = stream_of(sock)
        stream.idle_s = self._idle_s
        with self._lock:
            if self._closed:
                stream.close()
                return
            self._streams.add(stream)
        try:
            self._converse(stream)
        except WireError as e:
            log.debug("transfer connection ended: %s", e)
        finally:
            with self._lock:
                self._streams.discard(stream)
            stream.close()

    def close(self) -> None:
        """End all connections; `serve` calls return soon after. Idempotent."""
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()

    def _converse(self, stream: Stream) -> None:
        data = bytearray(frames.HEADER.size)
        while stream.next_header(memoryview(data)):
            header = frames.parse_header(data)
            if header.kind is Kind.DONE:
                raise ProtocolError("a reply where a request belongs")
            table = bytearray(header.table_bytes)
            stream.receive([memoryview(table)])
            spans = frames.parse_spans(table, header.total)
            with self._registry.use(spans, stream.cancel) as use:
                if header.kind is Kind.READ:
                    _answer_read(stream, header, use.found)
                else:
                    _answer_write(stream, header, use.found, [span.size for span in spans])


def _answer_read(stream: Stream, header: Header, found: Sequence[Found]) -> None:
    pieces = [f for f in found if isinstance(f, Piece)]
    total = sum(len(p.view) for p in pieces)
    sums = frames.checksums([p.view for p in pieces]) if header.checksums else b""
    waiting: list[memoryview | bytes] = [_reply(header, [_outcome(f) for f in found], total)]
    for region, start, size in _runs(pieces):
        run = region.view[start : start + size]
        if region.fd >= 0 and size >= _FILE_FROM:
            stream.send(waiting, more=True)
            stream.send_file(region.fd, region.fd_offset + start, size, run)
            waiting = []
        else:
            waiting.append(run)
    stream.send([*waiting, sums])


def _runs(pieces: Sequence[Piece]) -> list[tuple[Region, int, int]]:
    """(region, start, size), neighbours made one."""
    runs: list[tuple[Region, int, int]] = []
    for region, start, view in pieces:
        if runs and runs[-1][0] is region and runs[-1][1] + runs[-1][2] == start:
            runs[-1] = (region, runs[-1][1], runs[-1][2] + len(view))
        else:
            runs.append((region, start, len(view)))
    return runs


def _answer_write(stream: Stream, header: Header, found: Sequence[Found], sizes: Sequence[int]) -> None:
    targets = [_writable(f) for f in found]
    ready: list[memoryview] = []
    for target, size in zip(targets, sizes, strict=True):
        if isinstance(target, Piece):
            ready.append(target.view)
        else:
            stream.receive(ready)
            ready = []
            _skip(stream, size)
    stream.receive(ready)
    outcomes = [_outcome(t) for t in targets]
    if header.checksums:
        sums = bytearray(8 * header.items)
        stream.receive([memoryview(sums)])
        outcomes = [_verified(*each) for each in zip(targets, outcomes, frames.parse_checksums(sums), strict=True)]
    stream.send([_reply(header, outcomes, 0)])


def _writable(found: Found) -> Found:
    if isinstance(found, Piece) and found.view.readonly:
        return TransferError("the region can only be read")
    return found


def _skip(stream: Stream, size: int) -> None:
    """The bytes of a refused span are on their way already; they are read and dropped."""
    scratch = memoryview(bytearray(min(size, _SCRATCH)))
    while size:
        part = scratch[: min(size, _SCRATCH)]
        stream.receive([part])
        size -= len(part)


def _outcome(found: Found) -> tuple[Status, int]:
    if isinstance(found, Piece):
        return Status.OK, len(found.view)
    return frames.status_of(found), 0


def _verified(target: Found, outcome: tuple[Status, int], checksum: int) -> tuple[Status, int]:
    if isinstance(target, Piece) and frames.checksum(target.view) != checksum:
        return Status.DAMAGED, 0
    return outcome


def _reply(header: Header, outcomes: Sequence[tuple[Status, int]], total: int) -> bytes:
    return frames.header(Kind.DONE, header.checksums, header.items, total) + frames.results_table(outcomes)
