"""The pool as a client sees it: one home messenger for writes, all of them for reads.

Bytes never pass through a socket: the client writes into and reads from the messengers' mapped segments. A read that fails because
a messenger is away is a miss; a write that fails is a typed error per key. Links come back by themselves.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence

from moonpool.clock import Clock, SystemClock
from moonpool.errors import ConfigError, FrameTooLarge, MoonpoolError, PoolClosed, PoolError, WrongSize, from_fields
from moonpool.keys import PageKey
from moonpool.store.base import EventStream, KVPool, Match, ReadLease, Reservation
from moonpool.store.events import MergedEvents
from moonpool.store.handles import AWAY, PoolLease, PoolReservation
from moonpool.store.links import MasterLink, MessengerLink, Reconnecting
from moonpool.store.peers import Peer, Peers
from moonpool.types import PoolStats, Put, PutOutcome
from moonpool.wire import messages as m
from moonpool.wire.rpc import Channel, SocketChannel

_HOME_TIMEOUT_S = 10.0
_MASTER_TIMEOUT_S = 2.0
"""The master stands in the way of reads that miss at home, so its silence must be cheap."""


class PoolClient(KVPool):
    """See `connect`. `home` opens a channel to the home messenger, `master` one to the master, if there is one."""

    def __init__(
        self,
        home: Callable[[], Channel],
        master: Callable[[], Channel] | None = None,
        *,
        home_socket: str = "",
        clock: Clock | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self._connect_home = home
        self._home = Reconnecting(lambda: MessengerLink.open(home()), clock)
        self._master = Reconnecting(lambda: MasterLink(master()), clock) if master else None
        self._peers = Peers(self._master, home_socket, clock)
        self._streams: weakref.WeakSet[MergedEvents] = weakref.WeakSet()
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
        return PoolClient(
            lambda: SocketChannel(home, _HOME_TIMEOUT_S),
            (lambda: SocketChannel(master, _MASTER_TIMEOUT_S)) if master else None,
            home_socket=home,
            clock=clock,
        )

    # -- writing

    def reserve(self, items: Sequence[tuple[str, int]]) -> list[Reservation | Put | MoonpoolError]:
        self._check([key for key, _ in items])
        for key, size in items:
            if not 0 <= size <= m.MAX_SIZE:
                raise WrongSize("not a size", key=key, need=f"0 to {m.MAX_SIZE} B", have=f"{size} B")
        try:
            link, reply = self._home.call(m.Reserve(list(items)), m.Reserved)
            return [_reservation(key, r, link) for (key, _), r in zip(items, reply.results, strict=True)]
        except AWAY as e:
            return [e for _ in items]

    def commit(self, reservations: Sequence[Reservation]) -> list[PutOutcome]:
        self._check_open()
        outcomes: dict[int, PutOutcome] = {}
        for link, mine in _by_link(reservations).items():
            for r in mine:
                r.end()  # before the object is visible: nobody may write to it then
            try:
                reply = self._home.call_on(link, m.Commit([r.id for r in mine]), m.Committed)
                results = [Put.STORED if isinstance(r, m.Done) else _error(r) for r in reply.results]
            except AWAY as e:
                results = [e for _ in mine]
            outcomes.update((id(r), o) for r, o in zip(mine, results, strict=True))
        return [outcomes[id(r)] for r in reservations]

    def revoke(self, reservations: Sequence[Reservation]) -> None:
        for link, mine in _by_link(reservations).items():
            for r in mine:
                r.end()
            with contextlib.suppress(*AWAY, PoolClosed):
                self._home.call_on(link, m.Revoke([r.id for r in mine]), m.Done)

    # -- reading

    def open_read(self, keys: Sequence[str]) -> ReadLease:
        self._check(keys)
        lease = PoolLease(keys)
        try:
            self._open_on(self._home, lease, range(len(keys)))
            missing = [i for i, v in enumerate(lease.views) if v is None]
            for peer, places in self._peers.locate([keys[i] for i in missing]):
                self._open_on(peer, lease, [missing[i] for i in places])
        except BaseException:
            lease.close()
            raise
        return lease

    def _open_on(self, manager: Peer, lease: PoolLease, places: Sequence[int]) -> None:
        with contextlib.suppress(*AWAY):
            link, opened = manager.call(m.OpenRead([lease.keys[i] for i in places]), m.Opened)
            lease.fill(places, manager, link, opened)

    def lookup(self, keys: Sequence[PageKey], origins: Sequence[str] = ()) -> list[Match | None]:
        native = [k.text for k in keys]
        self._check(native)
        found = self._lookup_home(native, origins)
        wanted = {  # better ones than home has: where that is an approximation, only the native page is
            i: [n] if f else [n, *(keys[i].converted(o).text for o in origins)]
            for i, (n, f) in enumerate(zip(native, found, strict=True))
            if f != n
        }
        held = self._held_elsewhere([c for candidates in wanted.values() for c in candidates])
        for i, candidates in wanted.items():
            found[i] = next((c for c in candidates if c in held), found[i])
        if origins:
            self._announce([n for n, f in zip(native, found, strict=True) if f is None], hinted=False)
        return [Match(f, f != n) if f else None for n, f in zip(native, found, strict=True)]

    def _lookup_home(self, native: list[str], origins: Sequence[str]) -> list[str | None]:
        try:
            return self._home.call(m.Lookup(native, list(origins)), m.Matches)[1].keys
        except AWAY:
            return [None] * len(native)

    def _held_elsewhere(self, keys: list[str]) -> set[str]:
        return {keys[i] for _, places in self._peers.locate(keys) for i in places}

    def batch_is_exist(self, keys: Sequence[str]) -> list[bool]:
        self._check(keys)
        try:
            found = self._home.call(m.Exist(list(keys)), m.Flags)[1].values
        except AWAY:
            found = [False] * len(keys)
        held = self._held_elsewhere([k for k, f in zip(keys, found, strict=True) if not f])
        return [f or k in held for k, f in zip(keys, found, strict=True)]

    # -- the rest

    def batch_remove(self, keys: Sequence[str]) -> list[bool]:
        self._check(keys)
        removed = [False] * len(keys)
        for manager in (self._home, *(peer for _, peer in self._peers.all().values())):
            with contextlib.suppress(*AWAY):
                flags = manager.call(m.Remove(list(keys)), m.Flags)[1].values
                removed = [a or b for a, b in zip(removed, flags, strict=True)]
        return removed

    def subscribe(self, owners: Sequence[str], capacity: int = 4096) -> EventStream:
        self._check_open()
        stream = MergedEvents(owners, capacity, self._event_sources)
        self._streams.add(stream)
        return stream

    def _event_sources(self) -> dict[str, Callable[[], Channel]]:
        """How to reach each messenger for events; asked again and again, so that one that joins later is heard."""
        self._check_open()
        sources: dict[str, Callable[[], Channel]] = {"": self._connect_home}
        for name, (socket, _) in self._peers.all().items():
            sources[name] = lambda socket=socket: SocketChannel(socket)  # type: ignore[misc]
        return sources

    def hint(self, keys: Sequence[PageKey]) -> None:
        native = [k.native.text for k in keys]
        self._check(native)
        self._announce(native, hinted=True)

    def _announce(self, keys: list[str], *, hinted: bool) -> None:
        if keys:
            with contextlib.suppress(*AWAY):  # best effort: an unheard miss is converted at the next one
                self._home.call(m.Announce(keys, hinted), m.Done)

    def get_c2c_config(self) -> bytes:
        self._check_open()
        return self._master.call(m.GetC2C(), m.C2C)[1].config if self._master else b""

    def stats(self) -> PoolStats:
        """The home messenger's figures. Raises ConnectionLost if it is away."""
        self._check_open()
        return self._home.call(m.GetStats(), m.Stats)[1].stats

    def close(self) -> None:
        self._closed = True
        for stream in list(self._streams):
            stream.close()
        self._home.close()
        self._peers.close()
        if self._master:
            self._master.close()

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed("the pool is closed")

    def _check(self, keys: Sequence[str]) -> None:
        """Refuse what a messenger would hang up on. Raises PoolError, FrameTooLarge."""
        self._check_open()
        if len(keys) > m.MAX_BATCH:
            raise FrameTooLarge("batch too large", need=f"<= {m.MAX_BATCH} keys", have=str(len(keys)), fix="Split it.")
        for key in keys:
            if not 0 < len(key) <= m.MAX_KEY or not (key.isascii() or _is_unicode(key)):
                raise PoolError("not a key", key=repr(key[:80]), need=f"1 to {m.MAX_KEY} characters of valid Unicode")


def _is_unicode(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def _first_messenger(master: str) -> str:
    channel = SocketChannel(master, _MASTER_TIMEOUT_S)
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
            return PoolReservation(key, result, link)
        case m.Existed():
            return Put.EXISTED
        case m.Error():
            return _error(result)


def _error(message: m.Error) -> MoonpoolError:
    return from_fields(message.name, message.fields)


def _by_link(reservations: Iterable[Reservation]) -> dict[MessengerLink, list[PoolReservation]]:
    groups: dict[MessengerLink, list[PoolReservation]] = {}
    for r in reservations:
        assert isinstance(r, PoolReservation), "a reservation of another pool"
        groups.setdefault(r.link, []).append(r)
    return groups
