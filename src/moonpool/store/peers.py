"""The messengers of the pool, as the master's index tells. Without a master, or while it is away, there are those of before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from moonpool.clock import Clock
from moonpool.errors import ConnectionLost, MoonpoolError
from moonpool.store.handles import AWAY, Peer
from moonpool.store.links import MasterLink, MessengerLink, Reconnecting
from moonpool.types import MessengerInfo
from moonpool.wire import messages as m

_BELIEVED_S = 2.0
"""How long a list of messengers is believed."""
_FRESH_S = 0.02
"""How long one is believed although something speaks against it."""
TIMEOUT_S = 5.0
"""Longest wait for another messenger: it only says where bytes lie, so it answers in well under a millisecond or is stuck."""


def host_id() -> str:
    """The same for processes on one running machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def addresses_of(info: MessengerInfo, here: str) -> list[str]:
    """How a client on the machine `here` reaches a messenger: through shared memory if it can, else over TCP."""
    near = [info.socket] if info.socket and info.host == here and Path(info.socket).is_socket() else []
    return near + ([info.listen] if info.listen else [])


def reach(info: MessengerInfo, here: str, open_link: Callable[[str], MessengerLink]) -> MessengerLink:
    """A link to this messenger from the machine `here`, by the nearest of its addresses. Raises ConnectionLost, DeadlineExceeded."""
    failed: MoonpoolError = ConnectionLost("no address reaches it from this machine", key=info.name)
    for address in addresses_of(info, here):
        try:
            link = open_link(address)
        except MoonpoolError as e:
            failed = e
            continue
        if link.name == info.name:
            return link
        link.close()  # another one's socket at the same path, in another container
    raise failed if isinstance(failed, AWAY) else ConnectionLost(str(failed), key=info.name)


class Peers:
    """All but the home messenger. Safe to use from several threads."""

    def __init__(
        self,
        master: Reconnecting[MasterLink] | None,
        open_link: Callable[[str], MessengerLink],
        clock: Clock,
        *,
        shared_memory: bool = True,
    ) -> None:
        self._master, self._open, self._clock = master, open_link, clock
        self._here = host_id() if shared_memory else ""
        self.home = ""
        """Name of the home messenger, which is not listed."""
        self._known: dict[str, MessengerInfo] = {}
        self._peers: dict[str, Peer] = {}
        self._asked_at = float("-inf")
        self._lock = threading.Lock()

    def known(self) -> dict[str, MessengerInfo]:
        """All messengers by name, the home too if the master knows it."""
        self._refresh()
        with self._lock:
            return dict(self._known)

    def all(self) -> dict[str, Peer]:
        """Links to the others by name."""
        self._refresh()
        with self._lock:
            return dict(self._peers)

    def forget_age(self) -> None:
        """Ask the master anew at the next use, unless it was asked just now."""
        if self._clock.now() - self._asked_at > _FRESH_S:
            self._asked_at = float("-inf")

    def _refresh(self) -> None:
        if self._master and self._clock.now() - self._asked_at > _BELIEVED_S:
            with self._lock:
                if self._clock.now() - self._asked_at > _BELIEVED_S:
                    self._asked_at = self._clock.now()
                    self._ask(self._master)

    def _ask(self, master: Reconnecting[MasterLink]) -> None:
        try:
            listed = {i.name: i for i in master.call(m.ListMessengers(), m.Messengers)[1].messengers}
        except MoonpoolError:
            return
        for name in list(self._peers):
            if name not in listed or _place(listed[name]) != _place(self._known[name]):
                self._peers.pop(name).close(at_once=False)
        self._known = listed
        for name, info in listed.items():
            if name != self.home and name not in self._peers:
                self._peers[name] = Reconnecting(self._opener(info), self._clock)

    def _opener(self, info: MessengerInfo) -> Callable[[], MessengerLink]:
        return lambda: reach(info, self._here, self._open)

    def locate(self, keys: Sequence[str]) -> list[tuple[Peer, list[int]]]:
        """Which of `keys` (by index) which messenger holds; each key at most once."""
        if not keys or self._master is None:
            return []
        peers = self.all()
        found: dict[str, list[int]] = {}
        holders = self.holders(keys)
        if any(name != self.home and name not in peers for names in holders for name in names):
            self.forget_age()  # somebody has just joined
            peers = self.all()
        for i, names in enumerate(holders):
            here = next((n for n in names if n in peers), None)
            if here:
                found.setdefault(here, []).append(i)
        return [(peers[name], places) for name, places in found.items()]

    def holders(self, keys: Sequence[str]) -> list[list[str]]:
        """Names of the messengers that hold each key, by the master's index; none while it is away."""
        found: list[list[str]] = []
        try:
            for start in range(0, len(keys) if self._master else 0, m.MAX_BATCH):
                piece = list(keys[start : start + m.MAX_BATCH])
                assert self._master is not None
                found += self._master.call(m.Locate(piece), m.Located)[1].holders
        except AWAY:
            pass  # what was located before is still good
        return found + [[] for _ in range(len(keys) - len(found))]

    def close(self) -> None:
        with self._lock:
            while self._peers:
                self._peers.popitem()[1].close()


def _place(info: MessengerInfo) -> tuple[str, str, str]:
    return info.socket, info.listen, info.host
