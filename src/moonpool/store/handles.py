"""What a client holds open: reservations, on one messenger or several, and read leases."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from moonpool.errors import ConnectionLost, DeadlineExceeded, PoolClosed
from moonpool.store.base import ReadLease, Reservation
from moonpool.store.links import MessengerLink, Reconnecting
from moonpool.store.memory import Span
from moonpool.wire import messages as m

AWAY = (ConnectionLost, DeadlineExceeded)
"""The other side does not answer: its session, and with it every handle of it, is gone."""

Peer = Reconnecting[MessengerLink]


class Part(NamedTuple):
    """One copy that is being made. It belongs to one session (`link`): a messenger that was restarted does not know it, whatever
    its number."""

    manager: Peer
    link: MessengerLink
    id: int
    span: Span


class PoolReservation(Reservation):
    """`view` is the first part's memory, or memory of its own where that cannot be written to in place."""

    __slots__ = ("_held", "_in_place", "_value", "_view", "key", "parts", "replace", "strict")

    def __init__(self, key: str, parts: list[Part], *, replace: bool = False, strict: bool = True) -> None:
        """The parts' links are held for it."""
        self._held = True
        self.key, self.parts, self.replace, self.strict = key, parts, replace, strict
        self._view = parts[0].link.memory.writable(parts[0].span)
        self._in_place = self._view is not None
        self._value: memoryview | None = None

    @property
    def view(self) -> memoryview:
        if self._view is None:
            self._view = memoryview(bytearray(self.parts[0].span[1]))
        return self._view

    def fill(self, value: memoryview) -> bool:
        if not self._in_place:
            self._value = value  # sent from where it is, at the commit
        return not self._in_place

    @property
    def complete(self) -> bool:
        """There is nothing to send."""
        return self._in_place and len(self.parts) == 1

    def to_send(self) -> list[tuple[Part, memoryview]]:
        """Copies that still have to be made."""
        value = self.view if self._value is None else self._value
        return [(part, value) for part in self.parts[int(self._in_place) :]]

    def end(self) -> None:
        """The space is no longer this writer's: a write through `view` fails from now on."""
        self._value = None
        if self._view is not None:
            try:
                self._view.release()
            except BufferError:
                pass  # an array over it is still around; its owner was told not to write

    def let_go(self) -> None:
        """It was committed or revoked: the links need no longer be held. Idempotent."""
        held, self._held = self._held, False
        for part in self.parts if held else ():
            part.link.let_go()


class PoolLease(ReadLease):
    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        self.views = (None,) * len(keys)
        self._held: list[tuple[Peer, MessengerLink, int]] = []

    def fill(self, places: Sequence[int], manager: Peer, link: MessengerLink, opened: m.Opened) -> None:
        """Take over what a messenger opened for the keys at `places`. What it has to be fetched for is copied here, and the
        messenger's lease closed."""
        if not opened.lease or not link.hold():
            return
        found = [(place, span) for place, span in zip(places, opened.spans, strict=True) if span]
        if link.memory.mapped:
            self._held.append((manager, link, opened.lease))
            got = link.memory.read([span for _, span in found])
        else:
            try:
                got = link.memory.read([span for _, span in found])
            finally:
                held = close_lease(manager, link, opened.lease)
            if not held:
                return
        views = list(self.views)
        for (place, _), view in zip(found, got, strict=True):
            views[place] = view if isinstance(view, memoryview) else None
        self.views = tuple(views)

    def close(self) -> None:
        held, self._held = self._held, []
        self.views = (None,) * len(self.keys)
        for manager, link, lease in held:
            close_lease(manager, link, lease)


def close_lease(manager: Peer, link: MessengerLink, lease: int) -> bool:
    """Whether the messenger still held it; only then is what was copied over the network good. Mapped memory stays ours until we
    say so: nothing to ask."""
    try:
        if link.memory.mapped:
            with contextlib.suppress(*AWAY, PoolClosed):
                manager.post_on(link, m.CloseRead([lease]))
            return True
        with contextlib.suppress(*AWAY, PoolClosed):
            return manager.call_on(link, m.CloseRead([lease]), m.Flags).values[0]
        return False
    finally:
        link.let_go()
