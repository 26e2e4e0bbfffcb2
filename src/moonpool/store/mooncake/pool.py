"""`KVPool` on the real Mooncake Store. See the package's docstring for the picture."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from moonpool.config import load
from moonpool.errors import MoonpoolError, WrongSize
from moonpool.keys import PageKey
from moonpool.store.base import PLAIN, EventStream, KVPool, Match, ReadLease, Reservation, check_keys
from moonpool.store.master.rules import RuleBook
from moonpool.store.mooncake.admin import Admin
from moonpool.store.mooncake.cluster import Cluster
from moonpool.store.mooncake.config import MooncakeConfig, size_of
from moonpool.store.mooncake.events import LocalEvents
from moonpool.store.mooncake.handles import SlabLease
from moonpool.store.mooncake.peer import PeerStore, connect
from moonpool.store.mooncake.slab import Block, Slab
from moonpool.store.mooncake.watch import KeyWatch
from moonpool.store.mooncake.writer import Writer
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
    Rules,
    RuleStatus,
    Stored,
    TaskStatus,
)
from moonpool.wire.messages import MAX_SIZE


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
        self._peer, self._c2c = peer, c2c_config
        self._cluster = Cluster(peer, admin)
        self._lock = threading.Lock()
        self._reading: dict[SlabLease, list[Block]] = {}
        self._counts: Counter[str] = Counter()
        self._events = LocalEvents()
        self._rules, self._generation = RuleBook(), secrets.token_hex(8)
        try:
            self.slab = Slab(slab_size)
            peer.register(self.slab.address, self.slab.capacity)
        except BaseException:
            peer.close()
            raise
        self._writer = Writer(peer, self._cluster, self.slab)
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
        """`options` that the peer cannot follow (an atomic replace, all replicas or none) give Unsupported for every key."""
        self._check([key for key, _ in items])
        for key, size in items:
            if not 0 <= size <= MAX_SIZE:
                raise WrongSize("not a size", key=key, need=f"0 to {MAX_SIZE} B", have=f"{size} B")
        return self._writer.reserve(items, options)

    def commit(self, reservations: Sequence[Reservation]) -> list[PutOutcome]:
        self._check_open()
        self._note(reservations)
        outcomes, stored = self._writer.commit(reservations)
        self._note(stored)
        self._events.emit([Stored(r.key, r.block.size) for r in stored])
        self._count(puts=len(stored))
        return outcomes

    def _note(self, reservations: Sequence[Reservation]) -> None:
        """Before a put and after it, since the watch may look between the two."""
        if self._watch:
            self._watch.note(r.key for r in reservations)

    def revoke(self, reservations: Sequence[Reservation]) -> None:
        self._count(revoked=self._writer.revoke(reservations))

    # -- reading

    def open_read(self, keys: Sequence[str]) -> ReadLease:
        """Copies what exists into the slab. Raises NoSpace, ObjectTooLarge if it does not all fit there at once."""
        self._check(keys)
        sizes = self._cluster.sizes(list(dict.fromkeys(keys)))
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

    def lookup(self, keys: Sequence[PageKey], origins: Sequence[str] = ()) -> list[Match | None]:
        native = [k.text for k in keys]
        self._check(native)
        candidates = [[n, *(k.converted(o).text for o in origins)] for k, n in zip(keys, native, strict=True)]
        there = self._cluster.probe(c for each in candidates for c in each)
        found = [next((c for c in each if there[c] > 0), None) for each in candidates]
        if origins:
            self._events.emit([Missed(n) for n, f in zip(native, found, strict=True) if f is None])
        return [Match(f, f != n) if f else None for n, f in zip(native, found, strict=True)]

    def batch_is_exist(self, keys: Sequence[str]) -> list[bool]:
        self._check(keys)
        there = self._cluster.probe(keys)
        return [there[k] > 0 for k in keys]

    # -- objects of the cluster

    def batch_remove(self, keys: Sequence[str], *, force: bool = False, messenger: str = "") -> list[Removed]:
        """PINNED also where the peer holds the object under a read lease (`Cannot.REMOVE_WHAT_WAS_READ`). `force` removes it under
        the eyes of the peer's own readers, who may then read other bytes. Hard-pinned objects go without force."""
        self._check(keys)
        if messenger:
            return self._cluster.remove_replicas(keys, messenger, force=force) if keys else []
        return self._cluster.remove(keys, force=force) if keys else []

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        self._check(keys)
        found = self._cluster.sizes(list(dict.fromkeys(keys)))
        return [found.get(k) for k in keys]

    def replicas(self, keys: Sequence[str]) -> list[list[Replica]]:
        self._check(keys)
        return self._cluster.replicas(keys)

    def keys(self) -> Iterator[str]:
        """All keys of the cluster, whatever their tenant. Raises ConfigError without `admin_address`."""
        self._check_open()
        return self._cluster.keys()

    def remove_all(self, *, force: bool = False) -> int:
        self._check_open()
        return self._cluster.remove_all(force=force)

    def copy(self, key: str, targets: Sequence[str], *, source: str = "") -> str:
        self._check([key])
        return self._cluster.copy(key, targets, source)

    def move(self, key: str, target: str, *, source: str = "") -> str:
        self._check([key])
        return self._cluster.move(key, target, source)

    def task(self, task: str) -> TaskStatus:
        self._check_open()
        return self._cluster.task(task)

    def messengers(self) -> list[MessengerInfo]:
        """The cluster's segments. Raises ConfigError without `admin_address`."""
        self._check_open()
        return self._cluster.messengers()

    # -- the rest

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

    def report_rules(self, sender: str, rules: Sequence[RuleStatus]) -> Rules:
        """What this process's own parts said: an existing engine's cluster has no place for it."""
        with self._lock:
            self._rules.report(sender, rules)
            return Rules(generation=self._generation, rules=self._rules.rules(), disabled=dict(self._rules.disabled))

    def disable_rule(self, digest: str, reason: str) -> None:
        """In this process only."""
        with self._lock:
            self._rules.disable(digest, reason)

    def enable_rule(self, digest: str) -> None:
        with self._lock:
            self._rules.enable(digest)

    def stats(self) -> PoolStats:
        """Capacity, use, objects and evictions of the cluster (0 without `admin_address`; raises ConnectionLost if it does
        not answer); the rest is this client's. `slab` has its own figures."""
        self._check_open()
        cluster = self._cluster.figures()
        with self._lock:
            return PoolStats(
                capacity=cluster.get("master_total_capacity_bytes", 0),
                used=cluster.get("master_allocated_bytes", 0),
                objects=cluster.get("master_key_count", 0),
                evictions=cluster.get("master_evicted_key_count", 0),
                reads_open=len(self._reading),
                writes_open=self._writer.open,
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
        check_keys(keys)
