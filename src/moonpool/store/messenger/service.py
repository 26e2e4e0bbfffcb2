"""The messenger's RPC shell: one lock around `MessengerState`, messages in and out, a condition for who waits for events."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from moonpool.clock import Clock, SystemClock
from moonpool.errors import ConnectionLost, MoonpoolError, ProtocolError, Unsupported
from moonpool.store.messenger.below import Below
from moonpool.store.messenger.data import DataConnections
from moonpool.store.messenger.disk import DiskTier
from moonpool.store.messenger.quarantine import Process, Quarantine
from moonpool.store.messenger.records import Changes, Limits, Reserved, Row
from moonpool.store.messenger.state import MessengerState
from moonpool.store.messenger.tasks import Tasks
from moonpool.store.messenger.tenants import bare, scoped, tenant_of
from moonpool.transfer.registry import Region
from moonpool.transfer.segment import Segment
from moonpool.types import Pin, PoolStats, Put, PutOptions, Removed
from moonpool.wire import messages as m
from moonpool.wire.auth import THIS_PROCESS, Peer
from moonpool.wire.rpc import Service, error_message

log = logging.getLogger(__name__)

_PLAIN = PutOptions()
_BY_STEPS = frozenset({m.Remove, m.RemoveAll, m.EndCopy, m.Pull, m.GetTask})
_NEWS = frozenset({m.Commit, m.Announce})
_CHUNK = 1024
"""Objects removed at one time by `RemoveAll`: others get their turn in between."""


@dataclass(slots=True)
class Session:
    peer: Peer = THIS_PROCESS
    process: Process | None = None
    """The other end, where it is another process of this machine."""
    tenant: str = ""
    token: bytes = b""
    """Of its data connections, where it has any."""
    listing: Iterator[str] | None = None


class MessengerService(Service):
    requests = m.MessengerRequest

    def __init__(
        self,
        segment: Segment,
        *,
        name: str = "",
        clock: Clock | None = None,
        limits: Limits | None = None,
        disk: DiskTier | None = None,
        region: Region | None = None,
    ) -> None:
        """Takes over `disk`. `region`: the segment as other machines may name it, if they may."""
        self.segment, self.name, self._region = segment, name, region
        self.generation = secrets.token_hex(8)
        self._clock = clock or SystemClock()
        self._state = MessengerState(segment.size, self._clock, limits, disk)
        self._lock = threading.Lock()
        self._events = threading.Condition(self._lock)
        self._below = Below(self._state, segment, disk, self._lock) if disk is not None else None
        if disk is not None:
            self._state.found_below(disk.keys())
        self._quarantine = Quarantine(self._clock)
        self._sessions: dict[int, Session] = {}
        self._last_session = 0
        self._closing = False
        self.data: DataConnections | None = None
        """Set by who listens for other machines."""
        self.tasks: Tasks | None = None
        """Set by who runs the messenger on a pool: copies between messengers."""
        self.told = Told()
        """Set to what makes changes known to the master before they are acknowledged."""

    # -- sessions

    def open_session(self) -> int:
        with self._lock:
            self._last_session += 1
            self._sessions[self._last_session] = Session()
            return self._last_session

    def identify(self, session: int, peer: Peer) -> None:
        outside = peer.local and peer is not THIS_PROCESS  # pid 0: in a container whose processes we cannot see
        process = Process(peer.pid) if outside else None
        with self._lock:
            self._sessions[session].peer, self._sessions[session].process = peer, process

    def close_session(self, session: int) -> None:
        token = self._sessions[session].token
        cut = not token or self.data is None or self.data.end_session(token)
        with self._lock:
            known = self._sessions.pop(session)
            unfinished = self._state.end_session(session)
            if not cut:
                log.error("a data connection did not end; %d reservations stay taken", len(unfinished))
            elif unfinished and known.process:
                self._quarantine.hold(unfinished, known.process)
            else:  # a session of this process is closed by its own will, one from elsewhere has lost its data connections
                self._state.release(unfinished)
                if known.process:
                    known.process.close()
            self._release()
            self._events.notify_all()

    def _release(self) -> None:
        if len(self._quarantine):
            self._state.release(self._quarantine.over())

    def descriptor(self, request: Any) -> int | None:
        return self.segment.fd if isinstance(request, m.Hello) else None

    def close(self) -> None:
        """Wake everybody who waits; later requests are refused."""
        with self._lock:
            self._closing = True
            self._events.notify_all()
        if self.tasks:
            self.tasks.close()
        if self.data:
            self.data.close()
        if self._below:
            self._below.close()
        with self._lock:
            self._quarantine.close()

    # -- requests

    def handle(self, session: int, request: Any) -> m.Message:
        kind = type(request)
        if kind in m.ADMIN:
            self._sessions[session].peer.require_admin(kind.__name__)
        if kind in _BY_STEPS:
            return self._answer_by_steps(session, request)
        if self._below:
            if kind is m.OpenRead:
                return self._open_through(session, request.keys, self._below)
            if kind is m.Commit:
                self._drop_replaced(session, request.ids, self._below)
        with self._lock:
            self._check_open()
            self._release()
            reply = self._answer(session, self._sessions[session].tenant, request)
            if kind in _NEWS and self._state.events:
                self._events.notify_all()
        if kind is m.Commit:
            self.told.wait()
        return reply

    def _answer_by_steps(self, session: int, request: Any) -> m.Message:
        """What does not happen under the lock as a whole."""
        match request:
            case m.Remove(keys, force):
                return m.Removals(self._remove(scoped(self._tenant(session), keys), force))
            case m.RemoveAll(force):
                return m.Count(self._remove_all(self._tenant(session), force))
            case m.EndCopy(lease, remove):
                return m.Flags([self._end_copy(session, lease, remove=remove)])
            case m.Pull():
                return m.Started(self._tasks().start(self._tenant(session), request))
            case m.GetTask(id=task):
                return m.Task(self._tasks().status(task))
            case _:
                raise ProtocolError("not a messenger's request", have=type(request).__name__)

    def _check_open(self) -> None:
        if self._closing:
            raise ConnectionLost("the messenger is closing")

    def _tenant(self, session: int) -> str:
        return self._sessions[session].tenant

    def _tasks(self) -> Tasks:
        if self.tasks is None:
            raise Unsupported("this messenger is alone", fix="Copies need a pool with a master.")
        return self.tasks

    def _answer(self, session: int, tenant: str, request: Any) -> m.Message:
        state = self._state
        match request:
            case m.OpenRead(keys):
                return m.Opened(*state.open_read(session, scoped(tenant, keys)))
            case m.CloseRead(leases):
                return m.Flags(state.close_read(session, leases))
            case m.Reserve(items, options):
                return self._reserve(session, tenant, items, options or _PLAIN)
            case m.Commit(ids):
                return self._commit(session, ids)
            case m.Revoke(ids):
                state.revoke(session, ids)
                return m.Done()
            case m.Lookup(keys, origins):
                return m.Matches([k and bare(k) for k in state.lookup(scoped(tenant, keys), origins)])
            case m.Exist(keys):
                return m.Flags(state.exist(scoped(tenant, keys)))
            case _:
                return self._answer_rest(session, tenant, request)

    def _answer_rest(self, session: int, tenant: str, request: Any) -> m.Message:
        match request:
            case m.Hello(asked):
                return self._welcome(session, self._sessions[session], asked)
            case m.DescribeObjects(keys):
                return m.Descriptions([self._describe(k) for k in scoped(tenant, keys)])
            case m.ListKeys(limit, restart):
                return m.KeyPage(self._page(self._sessions[session], limit, restart))
            case m.Announce(keys, hinted):
                self._state.events.announce(scoped(tenant, keys), hinted=hinted)
                return m.Done()
            case m.Subscribe(owners, capacity):
                return m.Subscribed(self._state.events.subscribe(session, owners, capacity, tenant))
            case m.NextEvents():
                return self._next_events(request)
            case m.GetStats():
                return m.Stats(self._stats())
            case m.Drain(on):
                self._state.draining = on
                return m.Done()
            case m.ListTenants():
                return m.Tenants(sorted({tenant_of(key) for key in self._all_keys()}))
            case _:
                raise ProtocolError("not a messenger's request", have=type(request).__name__)

    def _welcome(self, number: int, session: Session, tenant: str) -> m.Welcome:
        if tenant != session.tenant and self._state.is_writing(number):
            raise ProtocolError("a session that writes stays with its tenant", key=tenant, have=session.tenant)
        session.tenant = tenant
        if session.peer.local or self.data is None or self._region is None:
            return m.Welcome(self.generation, self.segment.size, self.name)
        session.token = session.token or self.data.new_session()
        region = self._region
        return m.Welcome(self.generation, self.segment.size, self.name, region.id, region.generation, session.token)

    def _reserve(self, session: int, tenant: str, items: list[tuple[str, int]], options: PutOptions) -> m.Reserved:
        keys = scoped(tenant, [key for key, _ in items])
        if options.groups and len(options.groups) != len(items):
            raise ProtocolError("groups do not fit the items", need=str(len(items)), have=str(len(options.groups)))
        full = [(key, size) for key, (_, size) in zip(keys, items, strict=True)] if tenant else items
        results = self._state.reserve_all(session, full, options, options.groups)
        if isinstance(results, Row):
            return m.Reserved([], (results.id, results.offset))
        return m.Reserved([_reserved(r) for r in results])

    def _commit(self, session: int, ids: list[int]) -> m.Committed:
        outcomes = self._state.commit(session, ids)
        if all(o is Put.STORED for o in outcomes):
            return m.Committed(None)
        return m.Committed([error_message(o) if isinstance(o, MoonpoolError) else m.Done() for o in outcomes])

    def _drop_replaced(self, session: int, ids: list[int], below: Below) -> None:
        """What is about to be replaced must not come back from the disk when the new object is evicted."""
        with self._lock:
            stale = self._state.replaced_below(session, ids)
        if stale:
            below.drop(stale)

    def _open_through(self, session: int, keys: Sequence[str], below: Below) -> m.Opened:
        with self._lock:
            self._check_open()
            full = scoped(self._sessions[session].tenant, keys)
            lease, spans = self._state.open_read(session, full)
        if None in spans:
            lease, spans = below.load(session, full, lease, spans)
        return m.Opened(lease, spans)

    def _remove(self, full: Sequence[str], force: bool) -> list[Removed]:
        with self._lock:
            self._check_open()
            removed = self._state.remove(full, force=force)
        if self._below:
            wanted = [i for i, r in enumerate(removed) if r is not Removed.PINNED]
            on_disk = self._below.drop([full[i] for i in wanted])
            for i, there in zip(wanted, on_disk, strict=True):
                removed[i] = Removed.REMOVED if there else removed[i]
        self.told.wait()
        return removed

    def _remove_all(self, tenant: str, force: bool) -> int:
        keys = iter([k for k in self.keys() if tenant_of(k) == tenant])
        count = 0
        while chunk := list(islice(keys, _CHUNK)):
            count += sum(map(bool, self._remove(chunk, force)))
        return count

    def _end_copy(self, session: int, lease: int, *, remove: bool) -> bool:
        with self._lock:
            self._check_open()
            keys = self._state.end_copy(session, lease, remove=remove)
        if keys and remove:
            if self._below:
                self._below.drop(keys)
            self.told.wait()
        return keys is not None

    def _describe(self, key: str) -> m.Description | None:
        obj = self._state.find(key)
        if obj:
            left = max(0.0, obj.pinned_until - self._clock.now()) if obj.pin is Pin.SOFT else 0.0
            return m.Description(obj.size, True, obj.pin, left, obj.offset)
        size = self._below.disk.size(key) if self._below else None
        return None if size is None else m.Description(size, False, Pin.NONE, 0.0, 0)

    def _page(self, session: Session, limit: int, restart: bool) -> list[str]:
        if restart or session.listing is None:
            full = self._all_keys()
            session.listing = iter([bare(k) for k in full if tenant_of(k) == session.tenant])
        page = list(islice(session.listing, limit))
        if not page:
            session.listing = None
        return page

    def _next_events(self, request: m.NextEvents) -> m.Events:
        """Waits on the condition, which gives the lock up meanwhile."""
        events, dropped = self._state.events.take(request.subscription, request.limit)
        if not events and request.timeout > 0:
            self._events.wait_for(
                lambda: self._closing or self._state.events.waiting(request.subscription), timeout=request.timeout
            )
            self._check_open()
            events, dropped = self._state.events.take(request.subscription, request.limit)
        return m.Events(events, dropped)

    # -- for the publisher, the owner and tests

    def set_quotas(self, quotas: dict[str, int]) -> None:
        with self._lock:
            self._state.set_quotas(quotas)

    def used_by_tenant(self) -> dict[str, int]:
        with self._lock:
            return self._state.used_by_tenant()

    def drain(self, on: bool) -> None:
        """Take nothing new from now on, or do so again."""
        with self._lock:
            self._state.draining = on

    def spill_all(self, timeout: float) -> bool:
        """Before the end: copy all to the disk tier. False if there was no time for all; true if there is no such tier."""
        return self._below is None or self._below.spill_all(timeout)

    @property
    def draining(self) -> bool:
        return self._state.draining

    def take_changes(self) -> Changes:
        with self._lock:
            return self._state.take_changes()

    def keys(self) -> list[str]:
        """Full keys, in memory and on disk."""
        with self._lock:
            return self._all_keys()

    def _all_keys(self) -> list[str]:
        keys = self._state.keys()
        return list(dict.fromkeys([*keys, *self._below.disk.keys()])) if self._below else keys

    def stats(self) -> PoolStats:
        with self._lock:
            return self._stats()

    def _stats(self) -> PoolStats:
        stats = self._state.stats()
        if self._below is None:
            return stats
        disk = self._below.disk.stats()
        return msgspec.structs.replace(
            stats,
            disk_used=disk.bytes,
            disk_objects=disk.objects,
            disk_reads=disk.reads,
            disk_writes=disk.writes,
            disk_failures=disk.write_failures + disk.damaged,
        )

    def check_integrity(self) -> None:
        with self._lock:
            self._state.check_integrity()


class Told:
    """What makes changes known to the master. This one has no master."""

    def wait(self) -> None:
        """Return when what was changed before is known, or when waiting for it is no use."""


def _reserved(result: Reserved | Put | MoonpoolError) -> m.Span | m.Existed | m.Error:
    match result:
        case Reserved(id=handle, offset=offset, size=size):
            return m.Span(handle, offset, size)
        case Put():
            return m.Existed()
        case error:
            return error_message(error)
