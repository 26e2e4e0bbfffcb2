"""Registered memory: which ranges of this process a peer may name. Bookkeeping and one lock; no bytes are touched.

A region is named by its id and its generation. Ids are used again, generations never (not even by the next process, since they
start at random): memory that was given up and came back at the same address or id is a new generation, and a peer that still
uses the old name is refused. A transfer *uses* its regions while it runs; giving a region up waits for its uses, then cancels
them, so that no byte is read or written after `unregister` has returned.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from moonpool.errors import DeadlineExceeded, MoonpoolError, NotRegistered, Overlap, StaleRegion, TransferError

BY_ADDRESS = 0
"""As a region's id in a Span: `offset` is an absolute address, and `generation` 0 (any) or that of the region meant."""
_CANCELLED_S = 30.0
"""How long a cancelled transfer may take to end; its sockets are shut down, so it is far less unless the machine stands still."""


class Span(NamedTuple):
    region: int
    generation: int
    offset: int
    size: int


@dataclass(frozen=True, eq=False)
class Region:
    """`view` is the whole of it, until it is given up.

    `fd` is a file that holds the same bytes from its `fd_offset` on (a memfd that is mapped here), or -1. Reads are then sent
    without a copy, so the reader sees what the bytes are when they *arrive*: who changes them must know otherwise (a lease) that no
    reader still waits for them.
    """

    id: int
    generation: int
    address: int
    size: int
    view: memoryview
    name: str = ""
    fd: int = -1
    fd_offset: int = 0


class Piece(NamedTuple):
    """A span that was found: `view` is its bytes, `start` its offset in `region`."""

    region: Region
    start: int
    view: memoryview


Found: TypeAlias = Piece | MoonpoolError


@dataclass(eq=False)
class _Entry:
    region: Region
    uses: set[Use] = field(default_factory=set)
    leaving: bool = False


class Use:
    """Regions that a transfer works on. They stay registered until `release`, unless that takes too long: then `cancel`."""

    def __init__(
        self, registry: Registry, found: list[Found], entries: set[_Entry], cancel: Callable[[], None]
    ) -> None:
        self.found, self.cancel = found, cancel
        self._registry, self._entries = registry, entries

    def release(self) -> None:
        """Idempotent. The views are void from here on."""
        for piece in self.found:
            if isinstance(piece, Piece):
                piece.view.release()
        self._registry._released(self, self._entries)
        self._entries = set()

    def __enter__(self) -> Use:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Registry:
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: dict[int, _Entry] = {}
        self._order: list[tuple[int, int]] = []
        """(address, id) of all regions, sorted."""
        self._generation = int.from_bytes(os.urandom(6), "little") + 1

    def register(self, buffer: Any, *, name: str = "", fd: int = -1, fd_offset: int = 0) -> Region:
        """Make `buffer` (anything contiguous with the buffer protocol) known. It must stay where it is until `unregister`.

        A read-only buffer can only be read by peers. Raises TransferError (empty, not contiguous), Overlap.
        """
        view = bytes_of(buffer)
        if view.nbytes == 0:
            raise TransferError("a region cannot be empty", key=name, need=">= 1 B", have="0 B")
        address = address_of(view)
        with self._changed:
            self._refuse_overlap(address, view.nbytes)
            self._generation += 1
            region = Region(self._free_id(), self._generation, address, view.nbytes, view, name, fd, fd_offset)
            self._entries[region.id] = _Entry(region)
            insort(self._order, (address, region.id))
        return region

    def unregister(self, region: Region, *, wait_s: float = 5.0) -> None:
        """Give the region up. New transfers are refused at once; those under way get `wait_s`, then their connections are cut.

        Raises NotRegistered (not, or no longer), DeadlineExceeded (a transfer did not end; the region stays registered).
        """
        with self._changed:
            entry = self._entries.get(region.id)
            if entry is None or entry.region is not region or entry.leaving:
                raise NotRegistered("not a registered region", key=_range(region.address, region.size))
            entry.leaving = True
            self._changed.wait_for(lambda: not entry.uses, wait_s)
            late = list(entry.uses)
        for use in late:
            use.cancel()
        with self._changed:
            if not self._changed.wait_for(lambda: not entry.uses, _CANCELLED_S):
                entry.leaving = False
                raise DeadlineExceeded("a transfer still uses the region", key=_range(region.address, region.size))
            del self._entries[region.id]
            self._order.remove((region.address, region.id))
        region.view.release()

    def close(self, *, wait_s: float = 5.0) -> None:
        """Give all regions up."""
        for region in self.regions():
            try:
                self.unregister(region, wait_s=wait_s)
            except NotRegistered:
                pass  # its owner was faster

    def regions(self) -> list[Region]:
        """In order of address."""
        with self._changed:
            return [self._entries[id_].region for _, id_ in self._order if not self._entries[id_].leaving]

    def resolve(self, region_id: int, generation: int, offset: int, size: int) -> memoryview:
        """The bytes of a span. Raises NotRegistered, StaleRegion. Who reads or writes them for long takes a `use` instead."""
        with self._changed:
            found = self._find(Span(region_id, generation, offset, size))
        if isinstance(found, MoonpoolError):
            raise found
        return found.view

    def find(self, address: int, size: int) -> tuple[Region, int]:
        """The region that holds `[address, address + size)` wholly, and the offset there. Raises NotRegistered."""
        with self._changed:
            found = self._find(Span(BY_ADDRESS, 0, address, size))
        if isinstance(found, MoonpoolError):
            raise found
        return found.region, found.start

    def use(self, spans: Sequence[Span], cancel: Callable[[], None]) -> Use:
        """Look up `spans` and hold their regions. What is not found is an error in its place in `found`.

        `cancel` is called from another thread, at most once, when a region must go: it makes the transfer end soon.
        """
        with self._changed:
            found = [self._find(span) for span in spans]
            entries = {self._entries[f.region.id] for f in found if isinstance(f, Piece)}
            use = Use(self, found, entries, cancel)
            for entry in entries:
                entry.uses.add(use)
        return use

    def _released(self, use: Use, entries: set[_Entry]) -> None:
        with self._changed:
            for entry in entries:
                entry.uses.discard(use)
            self._changed.notify_all()

    def _find(self, span: Span) -> Found:
        region_id, generation, offset, size = span
        entry = self._at(offset) if region_id == BY_ADDRESS else self._entries.get(region_id)
        if entry is None or entry.leaving:
            return NotRegistered("not registered memory", key=span_name(span))
        region = entry.region
        if generation != region.generation and (generation or region_id != BY_ADDRESS):
            return StaleRegion(
                "the region was given up since",
                key=span_name(span),
                need=f"generation {region.generation}",
                have=str(generation),
                fix="Ask its owner for the region's present name.",
            )
        start = offset - region.address if region_id == BY_ADDRESS else offset
        if not 0 <= start <= start + size <= region.size:
            return NotRegistered("only partly registered", key=span_name(span), need=f"<= {region.size} B")
        return Piece(region, start, region.view[start : start + size])

    def _at(self, address: int) -> _Entry | None:
        """The region with the highest start at or below `address`."""
        i = bisect_right(self._order, (address, 1 << 64))
        return self._entries[self._order[i - 1][1]] if i else None

    def _refuse_overlap(self, address: int, size: int) -> None:
        before = self._at(address + size - 1)
        if before is not None and before.region.address + before.region.size > address:
            other = _range(before.region.address, before.region.size)
            raise Overlap("overlaps a registered region", key=_range(address, size), have=other)

    def _free_id(self) -> int:
        id_ = len(self._entries) + 1
        return id_ if id_ not in self._entries else next(i for i in range(1, id_) if i not in self._entries)


def bytes_of(buffer: Any) -> memoryview:
    """All of it, as bytes. Raises TransferError."""
    try:
        return memoryview(buffer).cast("B")
    except (TypeError, ValueError) as e:
        raise TransferError(f"not contiguous memory: {e}") from e


def address_of(view: memoryview) -> int:
    """Where the bytes lie. The view keeps them there."""
    pointer: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0] if view.nbytes else 0
    return pointer


def _range(address: int, size: int) -> str:
    return f"[{address:#x}, {address + size:#x})"


def span_name(span: Span) -> str:
    if span.region == BY_ADDRESS:
        return _range(span.offset, span.size)
    return f"region {span.region} {_range(span.offset, span.size)}"
