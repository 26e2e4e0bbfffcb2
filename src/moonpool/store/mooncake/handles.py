"""What a client of the existing engine holds open: space in the slab, nothing at the peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from moonpool.keys import PageKey
from moonpool.store.base import ReadLease, Reservation
from moonpool.store.mooncake.slab import Block
from moonpool.types import PutOptions


class How(NamedTuple):
    """How one object is to be stored."""

    options: PutOptions
    group: str


class SlabReservation(Reservation):
    """Belongs to this process alone: the peer hears of the object at commit."""

    __slots__ = ("_view", "block", "ended", "how", "key", "page")

    def __init__(self, key: str, page: PageKey | None, block: Block, view: memoryview, how: How) -> None:
        self.key, self.page, self.block, self._view = key, page, block, view
        self.how, self.ended = how, False

    @property
    def view(self) -> memoryview:
        return self._view

    def end(self) -> None:
        """A write through `view` fails from now on."""
        self.ended = True
        try:
            self.view.release()
        except BufferError:
            pass  # an array over it is still around; its owner was told not to write


class SlabLease(ReadLease):
    """Copies of objects in the slab: whatever becomes of the objects, the views stay until `close`."""

    def __init__(self, keys: Sequence[str], views: dict[str, memoryview], release: Callable[[SlabLease], None]) -> None:
        self.keys = tuple(keys)
        self.views = tuple(views.get(k) for k in keys)
        self._release = release

    def close(self) -> None:
        self.views = (None,) * len(self.keys)
        self._release(self)
