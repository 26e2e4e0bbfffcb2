"""The pool as a client sees it: one home messenger for writes, all of them for reads.

Bytes never pass through a socket: the client writes into and reads from the messengers' mapped segments. A read that fails because
a messenger is away is a miss; a write that fails is a typed error per key. Links come back by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.clock import Clock, SystemClock
from moonpool.errors import (
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    LeaseExpired,
    MoonpoolError,
    PoolClosed,
    from_fields,
)
from moonpool.keys import PageKey
from moonpool.store.base import EventStream, KVPool, Match, ReadLease, Reservation
from moonpool.store.events import MergedEvents
from moonpool.store.links import MasterLink, MessengerLink, Reconnecting
from moonpool.types import PoolStats, Put, PutOutcome
from moonpool.wire import messages as m
from moonpool.wire.rpc import Channel, SocketChannel

_AWAY = (ConnectionLost, DeadlineExceeded)
_MEMBERS_FOR_S = 2.0
"""How long a list of messengers is believed."""


class _Reservation(Reservation):
    def __init__(self, key: str, span: m.Span, link: MessengerLink) -> None:
        self.key, self.id, self.link = key, span.id, link
        self.view = link.segment.view[span.offset : span.offset + span.size]

    def seal(self) -> None:
        """No more writing through this view: the space is a visible object's now, or somebody else's."""
        try:
            self.view.release()
        except BufferError:
            pass  # an array over it still lives; its holder has been told (`KVPool.commit`)


class _Lease(ReadLease):
    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        self.views = (None,) * len(keys)
        self._held: list[tuple[Reconnecting[MessengerLink], MessengerLink, int]] = []

    def fill(
        self, places: Sequence[int], manager: Reconnecting[MessengerLink], link: MessengerLink, opened: m.Opened
    ) -> None:
        if opened.lease:
            self._held.append((manager, link, opened.lease))
        views = list(self.views)
        whole = link.segment.view.toreadonly()
        for place, span in zip(places, opened.spans, strict=True):
            if span:
                views[place] = whole[span[0] : span[0] + span[1]]
        self.views = tuple(views)

    def close(self) -> None:
        held, self._held = self._held, []
        self.views = (None,) * len(self.keys)
        for manager, link, lease in held:
            try:
                manager.call_on(link, m.CloseRead([lease]), m.Done)
            except (*_AWAY, LeaseExpired, PoolClosed):
                pass  # the session is gone, and the lease with it


class PoolClient(KVPool):
    """See `connect`. `home` opens a channel to the home messenger, `master` one to the master, if there is one."""

    def __init__(
        self, home: Callable[[], Channel], master: Callable[[], Channel] | None = None, *, clock: Clock | None = None
    ) -> None:
        self._clock = clock or SystemClock()
        self._connect_home = home
        self._home = Reconnecting(lambda: MessengerLink.open(home()), self._clock)
        self._master = Reconnecting(lambda: MasterLink(master()), self._clock) if master else None
        self._home_socket = ""
        self._peers: dict[str, tuple[str, Reconnecting[MessengerLink]]] = {}
        self._peers_at = float("-inf")
        self._closed = False
        self._home.get()  # a wrong address is an error now, not a pool that always misses

    @staticmethod
    def connect(master: str = "", *, messenger: str = "", clock: Clock | None = None) -> PoolClient:
        """Join a pool by its master's socket, or a single messenger by its own. With both, `messenger` is the home.

        Raises ConnectionLost if nobody answers, ConfigError if the pool has no messenger.
        """
        if not master and not messenger:
            raise ConfigError("no address", need="the socket of a master or of a messenger")
        home = messenger or _first_messenger(master)
        client = PoolClient(
            lambda: SocketChannel(home), (lambda: SocketChannel(master)) if master else None, clock=clock
        )
        client._home_socket = home
        return client

    # -- writing

    def reserve(self, items: Sequence[tuple[str, int]]) -> list[Reservation | Put | MoonpoolError]:
        self._check_open()
        try:
            link, reply = self._home.call(m.Reserve(list(items)), m.Reserved)
        except _AWAY as e:
            return [e for _ in items]
        return [_reservation(key, r, link) for (key, _), r in zip(items, reply.results, strict=True)]

    def commit(self, reservations: Sequence[Reservation]) -> list[PutOutcome]:
        self._check_open()
        outcomes: dict[int, PutOutcome] = {}
        for link, mine in _by_link(reservations).items():
            try:
                reply = self._home.call_on(link, m.Commit([r.id for r in mine]), m.Committed)
                results = [Put.STORED if isinstance(r, m.Done) else _error(r) for r in reply.results]
            except _AWAY as e:
                results = [e for _ in mine]
            outcomes.update((id(r), o) for r, o in zip(mine, results, strict=True))
            for r in mine:
                r.seal()
        return [outcomes[id(r)] for r in reservations]

    def revoke(self, reservations: Sequence[Reservation]) -> None:
        for link, mine in _by_link(reservations).items():
            for r in mine:
                r.seal()
            try:
                self._home.call_on(link, m.Revoke([r.id for r in mine]), m.Done)
            except (*_AWAY, PoolClosed):
                pass  # the session is gone, and its reservations with it

    # -- reading

    def open_read(self, keys: Sequence[str]) -> ReadLease:
        self._check_open()
        lease = _Lease(keys)
        try:
            self._open_on(self._home, lease, range(len(keys)))
            missing = [i for i, v in enumerate(lease.views) if v is None]
            for name, places in self._elsewhere(keys, missing).items():
                self._open_on(self._peers[name][1], lease, places)
        except BaseException:
            lease.close()
            raise
        return lease

    def _open_on(self, manager: Reconnecting[MessengerLink], lease: _Lease, places: Sequence[int]) -> None:
        try:
            link, opened = manager.call(m.OpenRead([lease.keys[i] for i in places]), m.Opened)
        except _AWAY:
            return
        lease.fill(places, manager, link, opened)

    def lookup(self, keys: Sequence[PageKey], origins: Sequence[str] = ()) -> list[Match | None]:
        self._check_open()
        native = [k.text for k in keys]
        found = self._lookup_home(native, origins)
        missing = [i for i, f in enumerate(found) if f is None]
        candidates = [[native[i], *(keys[i].converted(o).text for o in origins)] for i in missing]
        flat = [c for cs in candidates for c in cs]
        held = {flat[i] for places in self._elsewhere(flat, range(len(flat))).values() for i in places}
        for i, options in zip(missing, candidates, strict=True):
            found[i] = next((o for o in options if o in held), None)
        if origins:
            self._announce([n for n, f in zip(native, found, strict=True) if f is None], hinted=False)
        return [Match(f, f != n) if f else None for n, f in zip(native, found, strict=True)]

    def _lookup_home(self, native: list[str], origins: Sequence[str]) -> list[str | None]:
        try:
            return self._home.call(m.Lookup(native, list(origins)), m.Matches)[1].keys
        except _AWAY:
            return [None] * len(native)

    def batch_is_exist(self, keys: Sequence[str]) -> list[bool]:
        self._check_open()
        try:
            found = self._home.call(m.Exist(list(keys)), m.Flags)[1].values
        except _AWAY:
            found = [False] * len(keys)
        missing = [i for i, f in enumerate(found) if not f]
        for places in self._elsewhere(keys, missing).values():
            for i in places:
                found[i] = True
        return found

    # -- the rest

    def batch_remove(self, keys: Sequence[str]) -> list[bool]:
        self._check_open()
        removed = [False] * len(keys)
        managers = [self._home, *(self._peers[name][1] for name in self._members())]
        for manager in managers:
            try:
                flags = manager.call(m.Remove(list(keys)), m.Flags)[1].values
            except _AWAY:
                continue
            removed = [a or b for a, b in zip(removed, flags, strict=True)]
        return removed

    def subscribe(self, owners: Sequence[str], capacity: int = 4096) -> EventStream:
        self._check_open()
        return MergedEvents(owners, capacity, self._event_sources)

    def _event_sources(self) -> dict[str, Callable[[], Channel]]:
        """How to reach each messenger for events; asked again and again, so that one that joins later is heard."""
        self._check_open()
        sources: dict[str, Callable[[], Channel]] = {"": self._connect_home}
        for name in self._members():
            socket = self._peers[name][0]
            sources[name] = lambda socket=socket: SocketChannel(socket)  # type: ignore[misc]
        return sources

    def hint(self, keys: Sequence[PageKey]) -> None:
        self._check_open()
        self._announce([k.native.text for k in keys], hinted=True)

    def _announce(self, keys: list[str], *, hinted: bool) -> None:
        if not keys:
            return
        try:
            self._home.call(m.Announce(keys, hinted), m.Done)
        except _AWAY:
            pass  # best effort: an unheard miss is converted at the next one

    def get_c2c_config(self) -> bytes:
        self._check_open()
        return self._master.call(m.GetC2C(), m.C2C)[1].config if self._master else b""

    def stats(self) -> PoolStats:
        """The home messenger's figures. Raises ConnectionLost if it is away."""
        self._check_open()
        return self._home.call(m.GetStats(), m.Stats)[1].stats

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._home.close()
        for _, peer in self._peers.values():
            peer.close()
        if self._master:
            self._master.close()

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed("the pool is closed")

    # -- other messengers

    def _members(self) -> list[str]:
        """Names of the messengers besides home, as the master knew them lately."""
        if self._master and self._clock.now() - self._peers_at > _MEMBERS_FOR_S:
            self._peers_at = self._clock.now()
            try:
                found = dict(self._master.call(m.ListMessengers(), m.Messengers)[1].messengers)
            except (*_AWAY, MoonpoolError):
                return list(self._peers)
            self._update_peers({n: s for n, s in found.items() if s != self._home_socket})
        return list(self._peers)

    def _update_peers(self, found: dict[str, str]) -> None:
        for name in [n for n, (socket, _) in self._peers.items() if found.get(n) != socket]:
            self._peers.pop(name)[1].close()
        for name, socket in found.items():
            if name not in self._peers:
                link: Reconnecting[MessengerLink] = Reconnecting(_opener(socket), self._clock)
                self._peers[name] = (socket, link)

    def _elsewhere(self, keys: Sequence[str], places: Sequence[int]) -> dict[str, list[int]]:
        """Which of `places` (indices into `keys`) the other messengers hold, by messenger."""
        others = set(self._members()) if places else set()
        if not others or not self._master:
            return {}
        try:
            holders = self._master.call(m.Locate([keys[i] for i in places]), m.Located)[1].holders
        except _AWAY:
            return {}
        found: dict[str, list[int]] = {}
        for i, names in zip(places, holders, strict=True):
            here = next((n for n in names if n in others), None)
            if here:
                found.setdefault(here, []).append(i)
        return found


def _opener(socket: str) -> Callable[[], MessengerLink]:
    return lambda: MessengerLink.open(SocketChannel(socket))


def _first_messenger(master: str) -> str:
    channel = SocketChannel(master)
    try:
        found = channel.call(m.ListMessengers(), m.Messengers).messengers
    finally:
        channel.close()
    if not found:
        raise ConfigError("the pool has no messenger", key=master, fix="Start one: `moonpool messenger`.")
    return found[0][1]


def _reservation(
    key: str, result: m.Span | m.Existed | m.Error, link: MessengerLink
) -> Reservation | Put | MoonpoolError:
    match result:
        case m.Span():
            return _Reservation(key, result, link)
        case m.Existed():
            return Put.EXISTED
        case m.Error():
            return _error(result)


def _error(message: m.Error) -> MoonpoolError:
    return from_fields(message.name, message.fields)


def _by_link(reservations: Sequence[Reservation]) -> dict[MessengerLink, list[_Reservation]]:
    groups: dict[MessengerLink, list[_Reservation]] = {}
    for r in reservations:
        assert isinstance(r, _Reservation), "a reservation of another pool"
        groups.setdefault(r.link, []).append(r)
    return groups
