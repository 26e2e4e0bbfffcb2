"""Pins and their store: pure, with time (`now`, Unix seconds: clients see it) and randomness as arguments.

    pending ──enough holders──► ready ──no holder left──► pending
       │                          │
       └──warming failed──► error └──expired──► inactive ──new time to live──► pending

Pending means that the conductor does not know enough holders (yet, or any more). An expired pin hits nothing and counts against no
quota; it can be looked at, and revived, for `keep_s` more.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from moonpool.conductor.caching.pin import Pin, PinId, PinLimits, Source, State, Wanted
from moonpool.conductor.chain import KeyChain
from moonpool.conductor.types import Chain, Random
from moonpool.errors import NoSpace, NotFound, QuotaExceeded, RequestError

_ID_BITS = 120


class Page(msgspec.Struct, frozen=True):
    pins: list[Pin]
    more: bool
    """Whether others follow."""


class Usage(msgspec.Struct, frozen=True):
    """What an owner holds now."""

    pins: int = 0
    tokens: int = 0


class PinStore:
    """Its owner is one event loop. All methods expire first, so that nothing old is ever found."""

    def __init__(self, random: Random, limits: PinLimits = PinLimits()) -> None:
        self.limits, self._random = limits, random
        self._pins: dict[PinId, Pin] = {}
        self._ends: dict[tuple[str, str], dict[int, dict[int, list[PinId]]]] = {}
        """(owner, model) → blocks → end key → living pins."""
        self._usage: dict[str, Usage] = {}
        self._times: list[tuple[float, PinId]] = []
        """When a pin must be looked at: its end, then its removal. May hold outdated entries."""
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(list(self._pins.values()))

    @property
    def nbytes(self) -> int:
        return self._bytes

    def usage(self, owner: str) -> Usage:
        return self._usage.get(owner, Usage())

    # -- made, found, used

    def create(self, wanted: Wanted, now: float) -> Pin:
        """Raises RequestError (shorter than a block, or over already), QuotaExceeded (the owner), NoSpace (all owners)."""
        self.expire(now)
        blocks = len(wanted.chain)
        if not blocks:
            raise RequestError(
                "too short to be cached", need=f">= {wanted.block_size} tokens", have=f"{wanted.tokens} tokens"
            )
        keys = array("Q", wanted.chain.keys())
        nbytes = wanted.content.nbytes + len(keys) * keys.itemsize
        expires = self._until(wanted.expires, now)
        self._admit(wanted.owner, wanted.tokens, nbytes)
        pin = Pin(
            id=self._new_id(),
            source=wanted.source,
            owner=wanted.owner,
            model=wanted.model,
            chain=KeyChain(keys),
            saves=blocks * wanted.block_size,
            tokens=wanted.tokens,
            created=now,
            updated=now,
            expires=expires,
            replicas=wanted.replicas,
            name=wanted.name,
            description=wanted.description,
            metadata=dict(wanted.metadata),
            content=wanted.content,
            nbytes=nbytes,
        )
        self._bytes += nbytes
        self._put(pin)
        return pin

    def ensure(self, wanted: Wanted, now: float) -> Pin:
        """The owner's pin with this end and source, kept until `wanted.expires` at least; made if there is none."""
        self.expire(now)
        blocks = len(wanted.chain)
        for pin in self._ending(wanted.owner, wanted.model, blocks, wanted.chain.key(blocks - 1) if blocks else 0):
            if pin.source == wanted.source:
                later = max(pin.expires, self._until(wanted.expires, now))
                return self._put(msgspec.structs.replace(pin, expires=later, updated=now))
        return self.create(wanted, now)

    def grow(self, wanted: Wanted, now: float) -> Pin:
        """As `ensure`; but a shorter pin of the same source and name that the chain begins with is replaced and its figures kept."""
        shorter = self.match(wanted.owner, wanted.model, wanted.chain, now, wanted.source)
        if shorter is None or shorter.name != wanted.name or shorter.blocks == len(wanted.chain):
            return self.ensure(wanted, now)
        self._admit_owner(wanted.owner, wanted.tokens - shorter.tokens, pins=0)
        self._remove(shorter)
        made = self.create(wanted, now)
        return self._put(msgspec.structs.replace(made, uses=shorter.uses, saved=shorter.saved, created=shorter.created))

    def get(self, owner: str, id_: PinId, now: float, source: Source | None = None) -> Pin:
        """Expired ones included, for a while. Raises NotFound: another owner's are not there either."""
        self.expire(now)
        pin = self._pins.get(id_)
        if pin is None or pin.owner != owner or source not in (None, pin.source):
            raise NotFound("no such cache", key=id_)
        return pin

    def match(self, owner: str, model: str, chain: Chain, now: float, source: Source | None = None) -> Pin | None:
        """The longest living pin (of a source) that the prompt begins with; of equal ones the one that stays longest."""
        self.expire(now)
        found = self._ends.get((owner, model))
        if not found:
            return None
        for blocks in sorted(found, reverse=True):
            ids = found[blocks].get(chain.key(blocks - 1), ()) if blocks <= len(chain) else ()
            pins = [p for i in ids if source in (None, (p := self._pins[i]).source)]
            if pins:
                return max(pins, key=lambda p: p.expires)
        return None

    def used(self, id_: PinId, cached_tokens: int, now: float) -> int:
        """A request hit it, and `cached_tokens` of its prompt were not computed → of these, the pin's part."""
        self.expire(now)
        pin = self._pins.get(id_)
        if pin is None or not pin.alive:
            return 0
        saved = max(0, min(pin.saves, cached_tokens))
        self._put(msgspec.structs.replace(pin, uses=pin.uses + 1, saved=pin.saved + saved))
        return saved

    # -- changed

    def reset_ttl(self, owner: str, id_: PinId, expires: float, now: float) -> Pin:
        """A new end, earlier or later; an expired or failed pin is pending again. Raises NotFound, RequestError, QuotaExceeded."""
        return self.update(owner, id_, now, expires=expires)

    def update(
        self,
        owner: str,
        id_: PinId,
        now: float,
        *,
        expires: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Pin:
        """Raises NotFound, RequestError (over already), QuotaExceeded (a revived one counts again)."""
        pin = self.get(owner, id_, now)
        changed: dict[str, Any] = {"updated": now}
        if metadata is not None:
            changed["metadata"] = dict(metadata)
        if expires is not None:
            changed["expires"] = self._until(expires, now)
            if not pin.alive:
                self._admit_owner(owner, pin.tokens)
                changed.update(state="pending", error="")
        return self._put(msgspec.structs.replace(pin, **changed))

    def observe(self, id_: PinId, holders: int, now: float) -> Pin | None:
        """So many instances hold all of its blocks now. None if there is no such pin."""
        self.expire(now)
        pin = self._pins.get(id_)
        if pin is None or not pin.alive:
            return pin
        state: State = pin.state
        if holders >= pin.replicas:
            state = "ready"
        elif not holders:
            state = "pending"
        return pin if state == pin.state else self._put(msgspec.structs.replace(pin, state=state, updated=now))

    def failed(self, id_: PinId, why: str, now: float) -> Pin | None:
        """It could not be warmed. None if there is no such pin."""
        self.expire(now)
        pin = self._pins.get(id_)
        if pin is None or pin.state != "pending":
            return pin
        return self._put(msgspec.structs.replace(pin, state="error", error=why, updated=now))

    def delete(self, owner: str, id_: PinId, now: float, source: Source | None = None) -> Pin:
        """Raises NotFound."""
        pin = self.get(owner, id_, now, source)
        self._remove(pin)
        return pin

    def expire(self, now: float) -> list[Pin]:
        """Those that have just become inactive."""
        ended: list[Pin] = []
        while self._times and self._times[0][0] <= now:
            at, id_ = heapq.heappop(self._times)
            pin = self._pins.get(id_)
            if pin is None or at != self._due(pin):
                continue
            if pin.state == "inactive":
                self._remove(pin)
            else:
                ended.append(self._put(msgspec.structs.replace(pin, state="inactive", error="")))
        return ended

    # -- many

    def page(
        self,
        owner: str,
        source: Source,
        now: float,
        *,
        limit: int = 20,
        after: PinId = "",
        before: PinId = "",
        newest_first: bool = True,
        keep: Callable[[Pin], bool] = lambda _: True,
    ) -> Page:
        """By time of creation, behind `after` and up to before `before`. Raises NotFound where these two are no pins."""
        self.expire(now)
        for edge in (after, before):
            if edge:
                self.get(owner, edge, now, source)
        mine = [p for p in self._pins.values() if p.owner == owner and p.source == source]
        mine.sort(key=lambda p: (p.created, p.id), reverse=newest_first)
        ids = [p.id for p in mine]
        first = ids.index(after) + 1 if after else 0
        last = ids.index(before) if before else len(ids)
        found = [p for p in mine[first:last] if keep(p)]
        return Page(found[:limit], len(found) > limit)

    # -- inside

    def _until(self, expires: float, now: float) -> float:
        if not expires > now:
            raise RequestError("a cache's end must lie ahead", need=f"> {now:.0f}", have=f"{expires:.0f}")
        return min(expires, now + self.limits.max_ttl_s)

    def _admit(self, owner: str, tokens: int, nbytes: int) -> None:
        self._admit_owner(owner, tokens)
        limits = self.limits
        if len(self._pins) >= limits.pins:
            raise NoSpace("the conductor keeps no more caches", need="one more", have=f"{limits.pins} caches")
        if self._bytes + nbytes > limits.content_bytes:
            raise NoSpace(
                "the conductor keeps no more content of caches",
                need=f"{nbytes} B",
                have=f"{limits.content_bytes - self._bytes} B left",
            )

    def _admit_owner(self, owner: str, tokens: int, pins: int = 1) -> None:
        held, limits = self.usage(owner), self.limits
        if held.pins + pins > limits.owner_pins:
            raise QuotaExceeded("too many caches", key=owner, need=f"<= {limits.owner_pins}", have=str(held.pins))
        if held.tokens + tokens > limits.owner_tokens:
            raise QuotaExceeded(
                "too many cached tokens",
                key=owner,
                need=f"{tokens} tokens",
                have=f"{limits.owner_tokens - held.tokens} of {limits.owner_tokens} left",
            )

    def _due(self, pin: Pin) -> float:
        return pin.expires + self.limits.keep_s if pin.state == "inactive" else pin.expires

    def _put(self, pin: Pin) -> Pin:
        """In the place of the one with its id."""
        before = self._pins.get(pin.id)
        self._pins[pin.id] = pin
        turned = before is None or before.alive != pin.alive
        if turned:
            self._count(pin, 1 if pin.alive else -1)
        if before is None or turned or self._due(before) != self._due(pin):
            heapq.heappush(self._times, (self._due(pin), pin.id))
            self._compact()
        return pin

    def _count(self, pin: Pin, sign: int) -> None:
        """A living pin is in the usage and can be matched; another is in neither."""
        held = self.usage(pin.owner)
        now = Usage(held.pins + sign, held.tokens + sign * pin.tokens)
        if now.pins:
            self._usage[pin.owner] = now
        else:
            del self._usage[pin.owner]
        place, empty = (pin.owner, pin.model), dict[int, dict[int, list[PinId]]]()
        lengths = self._ends.setdefault(place, empty)
        keys = lengths.setdefault(pin.blocks, {})
        ids = keys.setdefault(pin.end, [])
        ids.append(pin.id) if sign > 0 else ids.remove(pin.id)
        if not ids:
            del keys[pin.end]
        if not keys:
            del lengths[pin.blocks]
        if not lengths:
            del self._ends[place]

    def _ending(self, owner: str, model: str, blocks: int, end: int) -> list[Pin]:
        ids = self._ends.get((owner, model), {}).get(blocks, {}).get(end, [])
        return [self._pins[i] for i in ids]

    def _remove(self, pin: Pin) -> None:
        del self._pins[pin.id]
        self._bytes -= pin.nbytes
        if pin.alive:
            self._count(pin, -1)

    def _compact(self) -> None:
        """Outdated times are dropped before they outnumber the pins: a pin that is touched for ever leaves one each time."""
        if len(self._times) > 2 * len(self._pins) + 64:
            self._times = [(self._due(p), p.id) for p in self._pins.values()]
            heapq.heapify(self._times)

    def _new_id(self) -> PinId:
        while True:
            id_ = f"{self._random.randrange(1 << _ID_BITS):030x}"
            if id_ not in self._pins:
                return id_
