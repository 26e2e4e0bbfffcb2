"""Writing: reservations in the slab, one writer per key in this process, and the put itself."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from moonpool.errors import ConfigError, KeyBusy, LeaseExpired, MoonpoolError, NativeExists, PoolError
from moonpool.keys import PageKey
from moonpool.store.base import Reservation
from moonpool.store.mooncake.cluster import Cluster
from moonpool.store.mooncake.codes import error_of
from moonpool.store.mooncake.handles import How, SlabReservation
from moonpool.store.mooncake.limits import Cannot
from moonpool.store.mooncake.peer import PeerStore
from moonpool.store.mooncake.slab import Slab
from moonpool.types import Pin, Put, PutOptions, PutOutcome


class Writer:
    """A key is claimed before the peer is asked whether it is there, and until its commit has ended: the peer answers a put of an
    existing key like one of a new key, so nothing else tells the first writer in this process from the second."""

    def __init__(self, peer: PeerStore, cluster: Cluster, slab: Slab) -> None:
        self._peer, self._cluster, self._slab = peer, cluster, slab
        self._lock = threading.Lock()
        self._claims: dict[str, SlabReservation | None] = {}
        """None while it is not decided."""

    @property
    def open(self) -> int:
        """Reservations that are neither committed nor revoked."""
        with self._lock:
            return sum(r is not None for r in self._claims.values())

    def reserve(self, items: Sequence[tuple[str, int]], options: PutOptions) -> list[Reservation | Put | MoonpoolError]:
        if unfit := _unfit(options):
            return [unfit.error(key) for key, _ in items]
        groups = _groups(options, len(items))
        claimed = self._claim([key for key, _ in items])
        try:
            pages = {key: PageKey.parse(key) for key, _ in items}
            there = self._cluster.probe([*pages, *_natives(pages.values())])
            return [
                self._reserve(key, size, pages[key], there, How(options, group), mine=mine)
                for (key, size), group, mine in zip(items, groups, claimed, strict=True)
            ]
        finally:
            self._unclaim([key for (key, _), mine in zip(items, claimed, strict=True) if mine])

    def _claim(self, keys: Sequence[str]) -> list[bool]:
        """For each key, whether it was free."""
        claimed = []
        with self._lock:
            for key in keys:
                claimed.append(key not in self._claims)
                self._claims.setdefault(key, None)
        return claimed

    def _unclaim(self, keys: Sequence[str]) -> None:
        """Give up those that became no reservation."""
        with self._lock:
            for key in keys:
                if self._claims[key] is None:
                    del self._claims[key]

    def _reserve(
        self, key: str, size: int, page: PageKey | None, there: dict[str, int], how: How, *, mine: bool
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
            block = self._slab.take(key, size)
        except PoolError as e:
            return e
        reservation = SlabReservation(key, page, block, self._slab.view(block), how)
        with self._lock:
            self._claims[key] = reservation
        return reservation

    def commit(self, reservations: Sequence[Reservation]) -> tuple[list[PutOutcome], list[SlabReservation]]:
        """One outcome for each, and those that were stored."""
        mine = self._end(reservations)
        try:
            outcomes = self._store(mine)
        finally:
            self._give_up(mine)
        stored = [r for r in mine if outcomes[r] is Put.STORED]
        return [outcomes.pop(r) if r in outcomes else _late(r) for r in reservations], stored

    def revoke(self, reservations: Sequence[Reservation]) -> int:
        """Returns how many were still open."""
        mine = self._end(reservations)
        self._give_up(mine)
        return len(mine)

    def _end(self, reservations: Sequence[Reservation]) -> list[SlabReservation]:
        """Those that are still open, each once. Their views can no longer be written; their keys stay claimed."""
        mine: dict[SlabReservation, None] = {}
        for r in reservations:
            assert isinstance(r, SlabReservation), "a reservation of another pool"
            with self._lock:
                if self._claims.get(r.key) is r and not r.ended:
                    r.end()
                    mine[r] = None
        return list(mine)

    def _give_up(self, mine: Sequence[SlabReservation]) -> None:
        with self._lock:
            for r in mine:
                del self._claims[r.key]
        self._slab.give([r.block for r in mine])

    def _store(self, mine: Sequence[SlabReservation]) -> dict[Reservation, PutOutcome]:
        outcomes: dict[Reservation, PutOutcome] = {}
        alike: dict[PutOptions, list[SlabReservation]] = {}
        there = self._cluster.probe(_natives(r.page for r in mine))
        for r in mine:
            if _lost_to_native(r.page, there):
                outcomes[r] = NativeExists("a native page came first", key=r.key)
            else:
                alike.setdefault(r.how.options, []).append(r)
        for options, todo in alike.items():
            outcomes.update(self._put(todo, options))
        return outcomes

    def _put(self, todo: Sequence[SlabReservation], options: PutOptions) -> dict[Reservation, PutOutcome]:
        pointers, sizes = [self._slab.pointer(r.block) for r in todo], [r.block.size for r in todo]
        config = _replicate_config(self._peer.module, options, [r.how.group for r in todo])
        with self._peer.use() as store:
            codes = store.batch_put_from([r.key for r in todo], pointers, sizes, config)
        return {r: Put.STORED if c >= 0 else error_of(c, r.key) for r, c in zip(todo, codes, strict=True)}


def _natives(pages: Iterable[PageKey | None]) -> list[str]:
    """The native keys of those that are converted."""
    return [p.native.text for p in pages if p and p.origin]


def _lost_to_native(page: PageKey | None, there: dict[str, int]) -> bool:
    return page is not None and bool(page.origin) and there[page.native.text] > 0


def _late(reservation: Reservation) -> LeaseExpired:
    return LeaseExpired("the reservation was committed or revoked before", key=reservation.key)


def _replicate_config(module: Any, options: PutOptions, groups: Sequence[str]) -> Any:
    """The peer's `ReplicateConfig`. `groups`: one name per key, or empty."""
    config = module.ReplicateConfig()
    config.replica_num = options.replicas
    config.preferred_segments = list(options.preferred)
    config.with_hard_pin = options.pin is Pin.HARD
    if options.pin is Pin.SOFT:
        config.soft_pin_action = module.SoftPinAction.ENABLE
        config.soft_pin_ttl_ms = int(options.soft_pin_ttl_s * 1000)
    if any(groups):
        config.group_ids = list(groups)
    return config


def _groups(options: PutOptions, count: int) -> Sequence[str]:
    """One group name for each of `count` items. Raises ConfigError."""
    if options.groups and len(options.groups) != count:
        raise ConfigError("one group per item", need=str(count), have=str(len(options.groups)))
    return options.groups or ("",) * count


def _unfit(options: PutOptions) -> Cannot | None:
    """Why the peer cannot store like this."""
    if options.replace:
        return Cannot.REPLACE
    if options.replicas > 1 and options.strict_replicas:
        return Cannot.STRICT_REPLICAS
    return None
