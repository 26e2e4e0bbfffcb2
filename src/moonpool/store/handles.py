"""What a client holds open: reservations and read leases over a messenger's mapped segment."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from moonpool.errors import ConnectionLost, DeadlineExceeded, PoolClosed
from moonpool.store.base import ReadLease, Reservation
from moonpool.store.links import MessengerLink, Reconnecting
from moonpool.wire import messages as m

AWAY = (ConnectionLost, DeadlineExceeded)
"""The other side does not answer: its session, and with it every handle of it, is gone."""


class PoolReservation(Reservation):
    """Belongs to one session (`link`): a messenger that was restarted does not know it, whatever its number."""

    __slots__ = ("id", "key", "link", "view")

    def __init__(self, key: str, span: m.Span, link: MessengerLink) -> None:
        self.key, self.id, self.link = key, span.id, link
        self.view = link.segment.span(span.offset, span.size)

    def end(self) -> None:
        """The space is no longer this writer's: a write through `view` fails from now on."""
        try:
            self.view.release()
        except BufferError:
            pass  # an array over it is still around; its owner was told not to write


class PoolLease(ReadLease):
    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        self.views = (None,) * len(keys)
        self._held: list[tuple[Reconnecting[MessengerLink], MessengerLink, int]] = []

    def fill(
        self, places: Sequence[int], manager: Reconnecting[MessengerLink], link: MessengerLink, opened: m.Opened
    ) -> None:
        """Take over what a messenger opened for the keys at `places`."""
        if opened.lease:
            self._held.append((manager, link, opened.lease))
        views = list(self.views)
        for place, span in zip(places, opened.spans, strict=True):
            if span:
                views[place] = link.segment.span(*span, readonly=True)
        self.views = tuple(views)

    def close(self) -> None:
        held, self._held = self._held, []
        self.views = (None,) * len(self.keys)
        for manager, link, lease in held:
            with contextlib.suppress(*AWAY, PoolClosed):
                manager.call_on(link, m.CloseRead([lease]), m.Done)
