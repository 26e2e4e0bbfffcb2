"""`KVPool` on the real Mooncake Store. See the package's docstring for the picture."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moonpool.config import load
from moonpool.errors import FrameTooLarge, KeyBusy, LeaseExpired, MoonpoolError, NativeExists, PoolError, WrongSize
from moonpool.keys import PageKey
from moonpool.store.base import PLAIN, EventStream, KVPool, Match, ReadLease, Reservation
from moonpool.store.mooncake.admin import Admin
from moonpool.store.mooncake.codes import error_of
from moonpool.store.mooncake.config import MooncakeConfig, size_of
from moonpool.store.mooncake.events import LocalEvents
from moonpool.store.mooncake.handles import SlabLease, SlabReservation
from moonpool.store.mooncake.limits import Cannot
from moonpool.store.mooncake.peer import PeerStore, connect
from moonpool.store.mooncake.slab import Block, Slab
from moonpool.store.mooncake.watch import KeyWatch
from moonpool.types import (
    Hinted,
    MessengerInfo,
    Missed,
    PoolStats,
    Put,
    PutOptions,
    PutOutcome,
    Removed,
    Replica,
    Stored,
    TaskStatus,
)
from moonpool.wire.messages import MAX_BATCH, MAX_KEY, MAX_SIZE


class MooncakePool(KVPool):
    """A client of a Mooncake cluster. Every put through it is hooked: a native page's `Stored` is heard by the subscribers of
    this process. Use `connect`."""

    def __init__(
        self,
        peer: PeerStore,
        *,
        slab_size: int = 256 << 20,
        admin: Admin | None = None,
        watch_s: float = 0.0,
        c2c_config: bytes = b"",
    ) -> None:
        """Takes over `peer`. `admin` answers what the peer's client cannot; `watch_s` needs it."""
        self._peer, self._admin, self._c2c = peer, admin, c2c_config
        self._lock = threading.Lock()
        self._writing: dict[str, SlabReservation | None] = {}
        """Keys that this process is writing; None while it is not decided."""
        self._reading: dict[SlabLease, list[Block]] = {}
        self._counts: Counter[str] = Counter()
        self._events = LocalEvents()
        try:
            self.slab = Slab(slab_size)
            peer.register(self.slab.address, self.slab.capacity)
        except BaseException:
            peer.close()
            raise
        self._watch = KeyWatch(admin, self._events, watch_s) if admin else None

    @staticmethod
    def connect(config: MooncakeConfig | str | Path, *, c2c_config: bytes = b"") -> MooncakePool:
        """Join the cluster that `config` (or the YAML or JSON file of that name) describes. The peer's master knows no C2C
        config, so `get_c2c_config` gives what is passed here.

        Raises ConfigError (also where the peer's package is missing), ConnectionLost if no master answers.
        """
        if not isinstance(config, MooncakeConfig):
            config = load(config, MooncakeConfig)
        admin = Admin(config.admin_address, config.timeout_s) if config.admin_address else None
        slab_size = size_of(config.slab_size, "slab_size")
        return MooncakePool(
            connect(config), slab_size=slab_size, admin=admin, watch_s=config.watch_s, c2c_config=c2c_config
        )

    # -- writing

    def reserve(
        self, items: Sequence[tuple[str, int]], options: PutOptions = PLAIN
    ) -> list[Reservation | Put | MoonpoolError]:
        """Of `options` only the defaults: see `Cannot.PUT_OPTIONS`."""
        self._check([key for key, _ in items])
        if options != PLAIN:
            return [Cannot.PUT_OPTIONS.error(key) for key, _ in items]
        for key, size in items:
            if not 0 <= size <= MAX_SIZE:
                raise WrongSize("not a size", key=key, need=f"0 to {MAX_SIZE} B", have=f"{size} B")
        claimed = self._claim([key for key, _ in items])
        try:
            pages = {key: PageKey.parse(key) for key, _ in items}
            there = self._probe([*pages, *_natives(pages.values())])
            return [
                self._reserve(key, size, pages[key], there, mine=mine)
                for (key, size), mine in zip(items, claimed, strict=True)
            ]
        finally:
            self._unclaim([key for (key, _), mine in zip(items, claimed, strict=True) if mine])

    def _claim(self, keys: Sequence[str]) -> list[bool]:
        """Keep this process's other writers off each key, or find that one of them has it. Claimed before the peer is asked what
        is there, and until a commit has ended: its answer to a put does not tell a new object from an old one."""
        claimed = []
        with self._lock:
            for key in keys:
                claimed.append(key not in self._writing)
                self._writing.setdefault(key, None)
        return claimed

    def _unclaim(self, keys: Sequence[str]) -> None:
        """Give up those that became no reservation."""
        with self._lock:
            for key in keys:
                if self._writing[key] is None:
                    del self._writing[key]

    def _reserve(
        self, key: str, size: int, page: PageKey | None, there: dict[str, int], *, mine: bool
    ) -> Reservation | Put | MoonpoolError:
        if there[key] != 0:
            return Put.EXISTED if there[key] > 0 else error_of(there[key], key)
        if _lost_to_native(page, there):
            return NativeExists("a native page is there; a converted one cannot replace it", key=key)
        if not mine:
            return KeyBusy("another writer is putting this key", key=key, fix="Read it in a moment, or try again.")
        if size == 0:
            return Cannot.EMPTY_OBJECTS.error(key)
        try:
            block = self.slab.take(key, size)
        except PoolError as e:
            return e
        reservation = SlabReservation(key, page, block, self.slab.view(block))
        with self._lock:
            self._writing[key] = reservation
        return reservation

    def commit(self, reservations: Sequence[Reservation]) -> list[PutOutcome]:
        self._check_open()
        mine = self._end(reservations)
        self._note(mine)
        try:
            outcomes = self._store(mine)
        finally:
            self._give_up(mine)
        self._tell([r for r in mine if outcomes[r] is Put.STORED])
        return [outcomes.pop(r) if r in outcomes else _late(r) for r in reservations]

    def _note(self, reservations: Sequence[SlabReservation]) -> None:
        """Before a put and after it, since the watch may look between the two."""
        if self._watch:
            self._watch.note(r.key for r in reservations)

    def _tell(self, stored: Sequence[SlabReservation]) -> None:
        self._note(stored)
        self._events.emit([Stored(r.key, r.block.size) for r in stored])

    def revoke(self, reservations: Sequence[Reservation]) -> None:
        mine = self._end(reservations)
        self._give_up(mine)
        self._count(revoked=len(mine))

    def _end(self, reservations: Sequence[Reservation]) -> list[SlabReservation]:
        """Those that are still open, each once. Their views can no longer be written; their keys stay taken."""
        mine: dict[SlabReservation, None] = {}
        for r in reservations:
            assert isinstance(r, SlabReservation), "a reservation of another pool"
            with self._lock:
                if self._writing.get(r.key) is r and not r.ended:
                    r.end()
                    mine[r] = None
        return list(mine)

    def _give_up(self, mine: Sequence[SlabReservation]) -> None:
        with self._lock:
            for r in mine:
                del self._writing[r.key]
        self.slab.give([r.block for r in mine])

    def _store(self, mine: Sequence[SlabReservation]) -> dict[Reservation, PutOutcome]:
        outcomes: dict[Reservation, PutOutcome] = {}
        there = self._probe(_natives(r.page for r in mine))
        for r in mine:
            if _lost_to_native(r.page, there):
                outcomes[r] = NativeExists("a native page came first", key=r.key)
        todo = [r for r in mine if r not in outcomes]
        if todo:
            pointers, sizes = [self.slab.pointer(r.block) for r in todo], [r.block.size for r in todo]
            with self._peer.use() as store:
                codes = store.batch_put_from([r.key for r in todo], pointers, sizes)
            for r, code in zip(todo, codes, strict=True):
                outcomes[r] = Put.STORED if code >= 0 else error_of(code, r.key)
        self._count(puts=sum(o is Put.STORED for o in outcomes.values()))
        return outcomes

    # -- reading

    def open_read(self, keys: Sequence[str]) -> ReadLease:
        """Copies what exists into the slab. Raises NoSpace, ObjectTooLarge if it does not all fit there at once."""
        self._check(keys)
        sizes = self._sizes(list(dict.fromkeys(keys)))
        blocks = dict(zip(sizes, self.slab.take_all(list(sizes.items())), strict=True))
        try:
            got = self._fetch(blocks)
        except BaseException:
            self.slab.give(list(blocks.values()))
            raise
        self.slab.give([b for k, b in blocks.items() if k not in got])
        views = {k: self.slab.view(blocks[k]).toreadonly() for k in got}
        lease = SlabLease(keys, views, self._close_read)
        hits = sum(v is not None for v in lease.views)
        with self._lock:
            self._counts.update(hits=hits, misses=len(keys) - hits)
            if got:
                self._reading[lease] = [blocks[k] for k in got]
        return lease

    def _fetch(self, blocks: dict[str, Block]) -> list[str]:
        """Keys whose bytes are all in their blocks now. Less than was announced is another object or a fault: a miss."""
        if not blocks:
            return []
        pointers, sizes = [self.slab.pointer(b) for b in blocks.values()], [b.size for b in blocks.values()]
        with self._peer.use() as store:
            codes = store.batch_get_into(list(blocks), pointers, sizes)
        return [k for (k, b), code in zip(blocks.items(), codes, strict=True) if code == b.size]

    def _close_read(self, lease: SlabLease) -> None:
        with self._lock:
            blocks = self._reading.pop(lease, [])
        self.slab.give(blocks)

    def _sizes(self, keys: list[str]) -> dict[str, int]:
        """Bytes of each object that is there; in the order of `keys`."""
        if not keys:
            return {}
        with self._peer.use() as store:
            found = store.batch_get_replica_desc(keys)
            sizes = {k: _size(found[k]) or store.get_size(k) for k in keys if found.get(k)}
        return {k: s for k, s in sizes.items() if s > 0}

    def lookup(self, keys: Sequence[PageKey], origins: Sequence[str] = ()) -> list[Match | None]:
        native = [k.text for k in keys]
        self._check(native)
        candidates = [[n, *(k.converted(o).text for o in origins)] for k, n in zip(keys, native, strict=True)]
        there = self._probe(c for each in candidates for c in each)
        found = [next((c for c in each if there[c] > 0), None) for each in candidates]
        if origins:
            self._events.emit([Missed(n) for n, f in zip(native, found, strict=True) if f is None])
        return [Match(f, f != n) if f else None for n, f in zip(native, found, strict=True)]

    def batch_is_exist(self, keys: Sequence[str]) -> list[bool]:
        self._check(keys)
        there = self._probe(keys)
        return [there[k] > 0 for k in keys]

    def _probe(self, keys: Iterable[str]) -> dict[str, int]:
        """1 = there, 0 = not, negative = the peer's error. One RPC for each `MAX_BATCH` keys."""
        unique = list(dict.fromkeys(keys))
        there: dict[str, int] = {}
        for start in range(0, len(unique), MAX_BATCH):
            part = unique[start : start + MAX_BATCH]
            with self._peer.use() as store:
                there.update(zip(part, store.batch_is_exist(part), strict=True))
        return there

    # -- the rest

    def batch_remove(self, keys: Sequence[str], *, force: bool = False, messenger: str = "") -> list[Removed]:
        """Also MISSING where the peer holds the object under a read lease, unless `force`: see `Cannot.REMOVE_WHAT_WAS_READ`."""
        self._check(keys)
        if messenger:
            raise Cannot.NAME_MESSENGERS.error(messenger)
        if not keys:
            return []
        with self._peer.use() as store:
            codes = store.batch_remove(list(keys), force)
        return [Removed.REMOVED if code == 0 else Removed.MISSING for code in codes]

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        self._check(keys)
        found = self._sizes(list(keys)) if keys else {}
        return [found.get(k) for k in keys]

    def replicas(self, keys: Sequence[str]) -> list[list[Replica]]:
        raise Cannot.NAME_MESSENGERS.error()

    def keys(self) -> Iterator[str]:
        raise Cannot.LIST_KEYS.error()

    def copy(self, key: str, targets: Sequence[str], *, source: str = "") -> str:
        raise Cannot.NAME_MESSENGERS.error(key)

    def move(self, key: str, target: str, *, source: str = "") -> str:
        raise Cannot.NAME_MESSENGERS.error(key)

    def task(self, task: str) -> TaskStatus:
        raise Cannot.NAME_MESSENGERS.error(task)

    def messengers(self) -> list[MessengerInfo]:
        raise Cannot.NAME_MESSENGERS.error()

    def subscribe(self, owners: Sequence[str], capacity: int = 4096) -> EventStream:
        """Events of this process, and with `watch_s` puts of others: see `Cannot.EVENTS_OF_OTHERS`."""
        self._check_open()
        return self._events.subscribe(owners, capacity)

    def hint(self, keys: Sequence[PageKey]) -> None:
        native = [k.native.text for k in keys]
        self._check(native)
        self._events.emit([Hinted(n) for n in native])

    def get_c2c_config(self) -> bytes:
        self._check_open()
        return self._c2c

    def stats(self) -> PoolStats:
        """Capacity, use, objects and evictions of the cluster (0 without `admin_address`; raises ConnectionLost if it does
        not answer); the rest is this client's. `slab` has its own figures."""
        self._check_open()
        cluster = self._admin.figures() if self._admin else {}
        with self._lock:
            return PoolStats(
                capacity=cluster.get("master_total_capacity_bytes", 0),
                used=cluster.get("master_allocated_bytes", 0),
                objects=cluster.get("master_key_count", 0),
                evictions=cluster.get("master_evicted_key_count", 0),
                reads_open=len(self._reading),
                writes_open=sum(w is not None for w in self._writing.values()),
                events_dropped=self._events.dropped,
                **self._counts,
            )

    def close(self) -> None:
        if self._watch:
            self._watch.close()
        self._events.close()
        self._peer.close(self.slab.address)

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _check_open(self) -> None:
        self._peer.check_open()

    def _check(self, keys: Sequence[str]) -> None:
        """Raises PoolClosed, PoolError, FrameTooLarge."""
        self._check_open()
        if len(keys) > MAX_BATCH:
            raise FrameTooLarge("batch too large", need=f"<= {MAX_BATCH} keys", have=str(len(keys)), fix="Split it.")
        for key in keys:
            if not 0 < len(key) <= MAX_KEY or not _is_unicode(key):
                raise PoolError("not a key", key=repr(key[:80]), need=f"1 to {MAX_KEY} characters of valid Unicode")


def _natives(pages: Iterable[PageKey | None]) -> list[str]:
    """The native keys of those that are converted."""
    return [p.native.text for p in pages if p and p.origin]


def _lost_to_native(page: PageKey | None, there: dict[str, int]) -> bool:
    return page is not None and bool(page.origin) and there[page.native.text] > 0


def _late(reservation: Reservation) -> LeaseExpired:
    return LeaseExpired("the reservation was committed or revoked before", key=reservation.key)


def _size(replicas: Sequence[Any]) -> int:
    """Bytes of an object by the peer's replica descriptors; 0 if none of them tells (a replica on another node's disk)."""
    for replica in replicas:
        if replica.is_memory_replica():
            return int(replica.get_memory_descriptor().buffer_descriptor.size)
        if replica.is_disk_replica():
            return int(replica.get_disk_descriptor().object_size)
    return 0


def _is_unicode(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True
