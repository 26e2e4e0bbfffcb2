"""Puts of other processes: the peer announces none, so the master's list of keys is compared from time to time.

Each look costs the master and this process a pass over all keys, so it is off unless `watch_s` says how often.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from moonpool.errors import ConnectionLost
from moonpool.keys import PageKey
from moonpool.store.mooncake.admin import Admin
from moonpool.store.mooncake.events import LocalEvents
from moonpool.types import Stored

log = logging.getLogger(__name__)


class KeyWatch:
    """Emits `Stored` (of size 0: the list does not tell) for native pages that somebody subscribed to and that were not in the
    list before. Pages that are there at the first look count as new: a converter that starts late catches up."""

    def __init__(self, admin: Admin, events: LocalEvents, every_s: float) -> None:
        self._admin, self._events, self._every_s = admin, events, every_s
        self._seen: set[str] = set()
        self._noted: set[str] = set()
        self._lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mooncake-watch", daemon=True)
        if every_s > 0:
            self._thread.start()

    def note(self, keys: Iterable[str]) -> None:
        """Keys that this process puts, and tells of, itself."""
        if self._every_s > 0:
            self._noted.update(keys)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.look()
            except ConnectionLost as e:
                if not self._lost:
                    log.warning("puts of other processes are not seen: %s", e)
                self._lost = True
            else:
                self._lost = False

    def look(self) -> None:
        """Compare once. Raises ConnectionLost."""
        owners = self._events.owners()
        noted, self._noted = self._noted, set()
        if not owners:
            return
        found: dict[str, PageKey] = {}
        for text in self._admin.all_keys():
            page = PageKey.parse(text)
            if page and not page.origin and page.owner in owners:
                found[text] = page
        new = found.keys() - self._seen - noted - self._noted
        self._seen = set(found)
        self._events.emit([Stored(k, 0) for k in sorted(new, key=lambda k: found[k].index)])

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
