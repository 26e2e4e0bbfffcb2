"""The pool as a client sees it: a home messenger that is near, and all the others.

On one machine bytes never pass through a socket: the client writes into and reads from the messengers' mapped segments. From other
machines they come over TCP, straight into the caller's buffers. A read that fails because a messenger is away is a miss; a write
that fails is a typed error per key. Links come back by themselves.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from random import Random

from moonpool.clock import Clock, SystemClock
from moonpool.errors import (
    ConfigError,
    MoonpoolError,
    NotFound,
    PoolClosed,
    PoolError,
    WrongSize,
)
from moonpool.keys import PageKey
from moonpool.store.base import PLAIN, EventStream, KVPool, Match, ReadLease, Reservation, as_bytes_view, check_keys
from moonpool.store.events import MergedEvents
from moonpool.store.handles import AWAY, Peer, PoolLease, PoolReservation, close_lease
from moonpool.store.links import MasterLink, MessengerLink, Reconnecting
from moonpool.store.peers import TIMEOUT_S, Peers, addresses_of, host_id
from moonpool.store.writer import NotARow, Writer
from moonpool.types import (
    BufferLike,
    MessengerInfo,
    PoolStats,
    Put,
    PutOptions,
    PutOutcome,
    Removed,
    Replica,
    Rules,
    RuleStatus,
    TaskStatus,
)
from moonpool.wire import messages as m
from moonpool.wire.auth import Security
from moonpool.wire.rpc import Channel, SocketChannel

_HOME_TIMEOUT_S = 10.0
_MASTER_TIMEOUT_S = 2.0
"""The master stands in the way of reads that miss at home, so its silence must be cheap."""
_LIST_PAGE = 8192


class PoolClient(KVPool):
    """See `connect`. `home` opens a link to the home messenger, `master` a channel to the master, if there is one; `open_link`
    one to the messenger at an address."""

    def __init__(
        self,
        home: Callable[[], MessengerLink],
        master: Callable[[], Channel] | None = None,
        open_link: Callable[[str], MessengerLink] | None = None,
        *,
        tenant: str = "",
        clock: Clock | None = None,
        shared_memory: bool = True,
        random: Random | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self._connect_home, self._open_link = home, open_link or MessengerLink.open
        self._home: Peer = Reconnecting(home, clock)
        self._master = Reconnecting(lambda: _master_link(master, tenant), clock) if master else None
        self._peers = Peers(self._master, self._open_link, clock, shared_memory=shared_memory)
        self._writer = Writer(self._home, self._peers, random or Random())
        self._streams: weakref.WeakSet[MergedEvents] = weakref.WeakSet()
        self._closed = False
        self._peers.home = self._home.get().name  # a wrong address is an error now, not a pool that always misses

    @staticmethod
    def connect(
        master: str = "",
        *,
        messenger: str = "",
        tenant: str = "",
        security: Security = Security(),
        clock: Clock | None = None,
        shared_memory: bool = True,
    ) -> PoolClient:
        """Join a pool by its master's address, or a single messenger by its own. With both, `messenger` is the home; without, the
        home is the nearest one. `shared_memory` false: over TCP even on one machine.

        Raises ConnectionLost, DeadlineExceeded or AccessDenied with the address, ConfigError if the pool has no messenger.
        """
        if not master and not messenger:
            raise ConfigError("no address", need="the address of a master or of a messenger")

        def open_link(address: str, timeout: float = TIMEOUT_S) -> MessengerLink:
            return MessengerLink.open(address, security=security, tenant=tenant, timeout=timeout)

        def open_master() -> Channel:
            return SocketChannel(master, _MASTER_TIMEOUT_S, security=security)

        home = messenger or _nearest_messenger(master, open_master, shared_memory)
        return PoolClient(
            lambda: open_link(home, _HOME_TIMEOUT_S),
            open_master if master else None,
            open_link,
            tenant=tenant,
            clock=clock,
            shared_memory=shared_memory,
        )

    # -- writing

    def reserve(
        self, items: Sequence[tuple[str, int]], options: PutOptions = PLAIN
    ) -> list[Reservation | Put | MoonpoolError]:
        self._check([key for key, _ in items])
        if items and not 0 <= min(size for _, size in items) <= max(size for _, size in items) <= m.MAX_SIZE:
            key, size = next(item for item in items if not 0 <= item[1] <= m.MAX_SIZE)
            raise WrongSize("not a size", key=key, need=f"0 to {m.MAX_SIZE} B", have=f"{size} B")
        if options is not PLAIN:
            _check_options(options, len(items))
        return self._writer.reserve(items, options)

    def batch_put(
        self, keys: Sequence[str], values: Sequence[BufferLike], options: PutOptions = PLAIN
    ) -> list[PutOutcome]:
        if options is PLAIN and len(set(keys)) == len(keys):
            self._check(keys)
            views = [as_bytes_view(v) for v in values]
            done = self._writer.put_row(keys, views)
            return self._fill(views, done.space) if isinstance(done, NotARow) else done
        return super().batch_put(keys, values, options)

    def commit(self, reservations: Sequence[Reservation]) -> list[PutOutcome]:
        self._check_open()
        return self._writer.commit(_ours(reservations))

    def revoke(self, reservations: Sequence[Reservation]) -> None:
        with contextlib.suppress(PoolClosed):
            self._writer.revoke(_ours(reservations))

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

    def batch_get_into(self, keys: Sequence[str], buffers: Sequence[BufferLike]) -> list[int | MoonpoolError]:
        self._check(keys)
        outs = [as_bytes_view(b, writable=True) for b in buffers]
        results: list[int | MoonpoolError | None] = [None] * len(keys)
        self._get_from(self._home, keys, outs, range(len(keys)), results)
        missing = [i for i, r in enumerate(results) if r is None]
        for peer, places in self._peers.locate([keys[i] for i in missing]):
            self._get_from(peer, keys, outs, [missing[i] for i in places], results)
        return [NotFound("no such object", key=k) if r is None else r for k, r in zip(keys, results, strict=True)]

    def _get_from(
        self,
        manager: Peer,
        keys: Sequence[str],
        outs: Sequence[memoryview],
        places: Sequence[int],
        results: list[int | MoonpoolError | None],
    ) -> None:
        """Copy what this messenger has straight into the buffers. A result is written only when it is known to be good."""
        with contextlib.suppress(*AWAY):
            link, opened = manager.call(m.OpenRead([keys[i] for i in places]), m.Opened)
            if not opened.lease or not link.hold():
                return
            fits: list[tuple[int, tuple[int, int]]] = []
            for i, span in zip(places, opened.spans, strict=True):
                if span and len(outs[i]) < span[1]:
                    need, have = f"{span[1]} B", f"{len(outs[i])} B"
                    results[i] = WrongSize("buffer too small", key=keys[i], need=need, have=have)
                elif span:
                    fits.append((i, span))
            try:
                errors = link.memory.read_into([s for _, s in fits], [outs[i][: s[1]] for i, s in fits])
            finally:
                held = close_lease(manager, link, opened.lease)
            if held:
                for (i, span), error in zip(fits, errors, strict=True):
                    results[i] = None if error else span[1]

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
        if all(found):
            return found
        held = self._held_elsewhere([k for k, f in zip(keys, found, strict=True) if not f])
        return [f or k in held for k, f in zip(keys, found, strict=True)]

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        return [found[0].size if found else None for found in self.replicas(keys)]

    def replicas(self, keys: Sequence[str]) -> list[list[Replica]]:
        self._check(keys)
        found: list[list[Replica]] = [[] for _ in keys]
        self._describe_on(self._home, self._peers.home, keys, range(len(keys)), found)
        peers = self._peers.all()
        places: dict[str, list[int]] = {}
        for i, names in enumerate(self._peers.holders(keys) if peers else []):
            for name in names:
                places.setdefault(name, []).append(i)
        for name in sorted(places.keys() & peers.keys()):
            self._describe_on(peers[name], name, keys, places[name], found)
        return found

    def _describe_on(
        self, manager: Peer, name: str, keys: Sequence[str], places: Sequence[int], found: list[list[Replica]]
    ) -> None:
        with contextlib.suppress(*AWAY):
            items = manager.call(m.DescribeObjects([keys[i] for i in places]), m.Descriptions)[1].items
            info = self._peers.known().get(name)
            address = (info.listen or info.socket) if info else ""
            for i, d in zip(places, items, strict=True):
                if d:
                    tier = "memory" if d.in_memory else "disk"
                    found[i].append(Replica(name, address, d.size, tier, d.pin, d.offset))  # type: ignore[arg-type]

    # -- the rest

    def batch_remove(self, keys: Sequence[str], *, force: bool = False, messenger: str = "") -> list[Removed]:
        self._check(keys)
        managers = [self._named(messenger)] if messenger else [self._home, *self._peers.all().values()]
        removed = [Removed.MISSING] * len(keys)
        for manager in managers:
            with contextlib.suppress(*AWAY):
                values = manager.call(m.Remove(list(keys), force), m.Removals)[1].values
                removed = [b if a is Removed.MISSING else a for a, b in zip(removed, values, strict=True)]
        return removed

    def remove_all(self, *, force: bool = False) -> int:
        self._check_open()
        count = 0
        for manager in (self._home, *self._peers.all().values()):
            with contextlib.suppress(*AWAY):
                count += manager.call(m.RemoveAll(force), m.Count)[1].value
        return count

    def keys(self) -> Iterator[str]:
        self._check_open()
        managers = [self._home, *self._peers.all().values()]
        seen: set[str] | None = set() if len(managers) > 1 else None
        for manager in managers:
            with contextlib.suppress(*AWAY):
                page = manager.call(m.ListKeys(_LIST_PAGE, restart=True), m.KeyPage)[1].keys
                while page:
                    yield from page if seen is None else [k for k in page if k not in seen]
                    if seen is not None:
                        seen.update(page)
                    page = manager.call(m.ListKeys(_LIST_PAGE), m.KeyPage)[1].keys

    def copy(self, key: str, targets: Sequence[str], *, source: str = "") -> str:
        return ",".join(self._start(key, target, source, move=False) for target in targets)

    def move(self, key: str, target: str, *, source: str = "") -> str:
        return self._start(key, target, source, move=True)

    def _start(self, key: str, target: str, source: str, *, move: bool) -> str:
        self._check([key])
        holders = [r.messenger for r in self.replicas([key])[0]]
        if not holders or (source and source not in holders):
            raise NotFound("no such object" if not holders else "no such copy", key=key, have=", ".join(holders))
        manager = self._named(target)
        at = source or next((h for h in holders if h != target), holders[0])
        info = self._peers.known().get(at)
        if info is None:
            raise NotFound("the master does not know the messenger that holds it", key=at)
        started = manager.call(m.Pull([key], info, move), m.Started)[1]
        return f"{target}/{started.ids[0]}"

    def task(self, task: str) -> TaskStatus:
        self._check_open()
        parts = [self._task(one) for one in task.split(",")]
        if len(parts) == 1:
            return parts[0]
        return _together(task, parts)

    def _task(self, task: str) -> TaskStatus:
        target, _, own = task.rpartition("/")
        return self._named(target).call(m.GetTask(own), m.Task)[1].status

    def messengers(self) -> list[MessengerInfo]:
        self._check_open()
        self._peers.forget_age()
        known = self._peers.known()
        return [known[name] for name in sorted(known)]

    def drain(self, messenger: str, *, on: bool = True) -> None:
        """Let a messenger take nothing new. An admin's verb. Raises NotFound, AccessDenied."""
        self._named(messenger).call(m.Drain(on), m.Done)

    def set_quota(self, tenant: str, limit: int | None) -> None:
        """Bytes that a tenant may hold in the whole pool; None lifts the limit. An admin's verb, for the master."""
        self._require_master().call(m.SetQuota(tenant, limit), m.Done)

    def quotas(self) -> dict[str, tuple[int, int]]:
        """By tenant: its limit (-1: none) and the bytes that it holds, as of the messengers' last heartbeats."""
        return self._require_master().call(m.GetQuotas(), m.Quotas)[1].tenants

    def _require_master(self) -> Reconnecting[MasterLink]:
        self._check_open()
        if self._master is None:
            raise ConfigError("this client has no master", fix="Connect by the master's address.")
        return self._master

    def _named(self, messenger: str) -> Peer:
        """The link to a messenger. Raises NotFound."""
        if messenger == self._peers.home:
            return self._home
        peers = self._peers.all()
        if messenger not in peers:
            self._peers.forget_age()
            peers = self._peers.all()
        if messenger not in peers:
            raise NotFound("no such messenger", key=messenger, have=", ".join([self._peers.home, *sorted(peers)]))
        return peers[messenger]

    def subscribe(self, owners: Sequence[str], capacity: int = 4096) -> EventStream:
        self._check_open()
        stream = MergedEvents(owners, capacity, self._event_sources)
        self._streams.add(stream)
        return stream

    def _event_sources(self) -> dict[str, Callable[[], MessengerLink]]:
        """How to reach each messenger for events; asked again and again, so that one that joins later is heard."""
        self._check_open()
        return {"": self._connect_home, **{name: peer.connect for name, peer in self._peers.all().items()}}

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

    def report_rules(self, sender: str, rules: Sequence[RuleStatus]) -> Rules:
        self._check_open()
        if self._master is None:
            return super().report_rules(sender, rules)
        return self._master.call(m.ReportRules(sender, list(rules)), m.RulesAre)[1].rules

    def disable_rule(self, digest: str, reason: str) -> None:
        self._check_open()
        if self._master:
            self._master.call(m.DisableRule(digest, reason), m.Done)

    def enable_rule(self, digest: str) -> None:
        self._check_open()
        if self._master is None:
            return super().enable_rule(digest)
        self._master.call(m.EnableRule(digest), m.Done)
        return None

    def stats(self) -> PoolStats:
        """The figures of all messengers that answer, added up. Raises ConnectionLost if none does."""
        self._check_open()
        total = None
        for manager in (self._home, *self._peers.all().values()):
            with contextlib.suppress(*AWAY):
                one = manager.call(m.GetStats(), m.Stats)[1].stats
                total = one if total is None else total + one
        return total or self._home.call(m.GetStats(), m.Stats)[1].stats

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
        """Raises PoolClosed, PoolError, FrameTooLarge."""
        self._check_open()
        check_keys(keys)


def _check_options(options: PutOptions, items: int) -> None:
    if options.replicas < 1:
        raise PoolError("not a number of copies", need=">= 1", have=str(options.replicas))
    if options.groups and len(options.groups) != items:
        raise PoolError("groups do not fit the keys", need=f"{items}, or none", have=str(len(options.groups)))
    if options.soft_pin_ttl_s <= 0:
        raise PoolError("not a time to pin for", need="> 0 s", have=f"{options.soft_pin_ttl_s} s")


def _ours(reservations: Sequence[Reservation]) -> list[PoolReservation]:
    ours = [r for r in reservations if isinstance(r, PoolReservation)]
    assert len(ours) == len(reservations), "a reservation of another pool"
    return ours


def _master_link(connect: Callable[[], Channel], tenant: str) -> MasterLink:
    channel = connect()
    if tenant:
        channel.call(m.Hello(tenant), m.Registered)
    return MasterLink(channel)


def _nearest_messenger(master: str, open_master: Callable[[], Channel], shared_memory: bool) -> str:
    """The address of one on this machine, or else of the emptiest."""
    channel = open_master()
    try:
        found = channel.call(m.ListMessengers(), m.Messengers).messengers
    finally:
        channel.close()
    here = host_id() if shared_memory else ""
    reachable = [(i.host != here, i.used / max(1, i.capacity), a[0]) for i in found if (a := addresses_of(i, here))]
    if not reachable:
        have = f"{len(found)} that this machine cannot reach" if found else "none"
        raise ConfigError(
            "the pool has no messenger to reach", key=master, have=have, fix="Start one here: `moonpool messenger`."
        )
    return min(reachable)[2]


def _together(task: str, parts: Sequence[TaskStatus]) -> TaskStatus:
    states = {p.state for p in parts}
    order = ("failed", "running", "pending", "done")
    return TaskStatus(
        id=task,
        kind=parts[0].kind,
        key=parts[0].key,
        source=parts[0].source,
        targets=tuple(t for p in parts for t in p.targets),
        state=next(s for s in order if s in states),
        done=sum(p.done for p in parts),
        total=sum(p.total for p in parts),
        error="; ".join(p.error for p in parts if p.error),
    )
