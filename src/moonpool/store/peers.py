"""The other messengers of the pool, as the master's index tells. Without a master, or while it is away, there are those of before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from moonpool.clock import Clock
from moonpool.errors import MoonpoolError
from moonpool.store.handles import AWAY
from moonpool.store.links import MasterLink, MessengerLink, Reconnecting
from moonpool.wire import messages as m
from moonpool.wire.rpc import SocketChannel

_BELIEVED_S = 2.0
"""How long a list of messengers is believed."""
TIMEOUT_S = 5.0
"""Longest wait for another messenger: it only says where bytes lie, so it answers in well under a millisecond or is stuck."""

Peer = Reconnecting[MessengerLink]


class Peers:
    """`home` is the socket of the messenger that is not to be listed. Safe to use from several threads."""

    def __init__(self, master: Reconnecting[MasterLink] | None, home: str, clock: Clock) -> None:
        self._master, self._home, self._clock = master, home, clock
        self._peers: dict[str, tuple[str, Peer]] = {}
        self._asked_at = float("-inf")
        self._lock = threading.Lock()

    def all(self) -> dict[str, tuple[str, Peer]]:
        """Socket and link by name."""
        with self._lock:
            if self._master and self._clock.now() - self._asked_at > _BELIEVED_S:
                self._asked_at = self._clock.now()
                self._ask(self._master)
            return dict(self._peers)

    def _ask(self, master: Reconnecting[MasterLink]) -> None:
        try:
            listed = dict(master.call(m.ListMessengers(), m.Messengers)[1].messengers)
        except MoonpoolError:
            return
        found = {n: s for n, s in listed.items() if s != self._home}
        for name in [n for n, (socket, _) in self._peers.items() if found.get(n) != socket]:
            self._peers.pop(name)[1].close()
        for name, socket in found.items():
            if name not in self._peers:
                self._peers[name] = (socket, Reconnecting(_opener(socket), self._clock))

    def locate(self, keys: Sequence[str]) -> list[tuple[Peer, list[int]]]:
        """Which of `keys` (by index) which messenger holds; each key at most once."""
        peers = self.all() if keys else {}
        if not peers or not self._master:
            return []
        found: dict[str, list[int]] = {}
        try:
            for start in range(0, len(keys), m.MAX_BATCH):
                piece = list(keys[start : start + m.MAX_BATCH])
                holders = self._master.call(m.Locate(piece), m.Located)[1].holders
                for i, names in enumerate(holders, start):
                    here = next((n for n in names if n in peers), None)
                    if here:
                        found.setdefault(here, []).append(i)
        except AWAY:
            pass  # what was located before is still good
        return [(peers[name][1], places) for name, places in found.items()]

    def close(self) -> None:
        with self._lock:
            while self._peers:
                self._peers.popitem()[1][1].close()


def _opener(socket: str) -> Callable[[], MessengerLink]:
    return lambda: MessengerLink.open(SocketChannel(socket, TIMEOUT_S))
