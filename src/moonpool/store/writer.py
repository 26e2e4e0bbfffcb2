"""Puts over several messengers: where each object goes, its copies, and all or nothing at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from random import Random
from typing import NamedTuple, TypeVar

from moonpool.errors import (
    ConnectionLost,
    MoonpoolError,
    NativeExists,
    NoSpace,
    NotEnoughMessengers,
    ObjectTooLarge,
    from_fields,
)
from moonpool.keys import PageKey
from moonpool.store.base import PLAIN, Reservation
from moonpool.store.handles import AWAY, Part, Peer, PoolReservation
from moonpool.store.links import MessengerLink
from moonpool.store.memory import MappedMemory
from moonpool.store.peers import Peers
from moonpool.store.placement import order
from moonpool.types import Put, PutOptions, PutOutcome
from moonpool.wire import messages as m

_ELSEWHERE = (NoSpace, ObjectTooLarge, *AWAY)
"""Refusals of one messenger that another one may not share."""


class NotARow(NamedTuple):
    space: list[Reservation | Put | MoonpoolError]


class Writer:
    def __init__(self, home: Peer, peers: Peers, random: Random) -> None:
        self._home, self._peers, self._random = home, peers, random

    # -- reserve

    def reserve(self, items: Sequence[tuple[str, int]], options: PutOptions) -> list[Reservation | Put | MoonpoolError]:
        others = self._peers.all()
        if not others and options.replicas == 1:
            return self._reserve_at_home(items, options)
        targets = self._targets(options, others)
        results: list[Reservation | Put | MoonpoolError | None] = [None] * len(items)
        if others:
            self._known_elsewhere([key for key, _ in items], options, results)
        copies = options.replicas
        if copies > len(targets):
            if options.strict_replicas:
                e = NotEnoughMessengers(
                    "fewer messengers than copies",
                    need=f"{copies} messengers",
                    have=str(len(targets)),
                    fix="Start more messengers, ask for fewer copies, or allow fewer (strict_replicas=False).",
                )
                return [r or e for r in results]
            copies = max(1, len(targets))
        parts: dict[int, list[Part]] = {i: [] for i, r in enumerate(results) if r is None}
        refused: dict[int, MoonpoolError] = {}
        for target in targets:
            wanting = [i for i, have in parts.items() if len(have) < copies and results[i] is None]
            if not wanting:
                break
            self._reserve_on(target, items, wanting, options, (parts, results, refused))
        for i, have in parts.items():
            if results[i] is None:
                results[i] = self._reservation(items[i][0], have, copies, options, refused.get(i))
        return [r for r in results if r is not None]

    def _reserve_at_home(
        self, items: Sequence[tuple[str, int]], options: PutOptions
    ) -> list[Reservation | Put | MoonpoolError]:
        """There is no other messenger."""
        home = self._home
        try:
            link, reply = home.call(m.Reserve(list(items), _wire(options)), m.Reserved)
        except AWAY as e:
            return [e for _ in items]
        return self._reservations(items, link, reply)

    def _reservations(
        self, items: Sequence[tuple[str, int]], link: MessengerLink, reply: m.Reserved
    ) -> list[Reservation | Put | MoonpoolError]:
        spans = reply.spans([size for _, size in items])
        if not link.hold(sum(isinstance(got, m.Span) for got in spans)):
            return [_gave_up(key) for key, _ in items]
        return [
            PoolReservation(key, [Part(self._home, link, got.id, (got.offset, got.size))])
            if isinstance(got, m.Span)
            else Put.EXISTED
            if isinstance(got, m.Existed)
            else _error(got)
            for (key, _), got in zip(items, spans, strict=True)
        ]

    def put_row(self, keys: Sequence[str], values: Sequence[memoryview]) -> list[PutOutcome] | NotARow:
        """The usual batch, in one go: plain, at home, all new. Where it is not that, nothing but `reserve` was done."""
        items = [(k, len(v)) for k, v in zip(keys, values, strict=True)]
        if self._peers.all() or not items:
            return NotARow(self.reserve(items, PLAIN))
        home = self._home
        try:
            link, reply = home.call(m.Reserve(items), m.Reserved)
        except AWAY as e:
            return [e for _ in keys]
        if reply.row is None or not isinstance(link.memory, MappedMemory):
            return NotARow(self._reservations(items, link, reply))
        if not link.hold():
            return [_gave_up(key) for key in keys]
        ids = list(range(reply.row[0], reply.row[0] + len(keys)))
        try:
            try:
                link.memory.write_row(reply.row[1], values)
            except BaseException:
                with contextlib.suppress(*AWAY):
                    home.call_on(link, m.Revoke(ids), m.Done)
                raise
            return self._commit_on(home, link, ids)
        finally:
            link.let_go()

    def _targets(self, options: PutOptions, others: dict[str, Peer]) -> list[Peer]:
        if not others:
            return [self._home]
        home = self._peers.home
        names = order(list(self._peers.known().values()), home=home, preferred=options.preferred, random=self._random)
        if not names or home not in self._peers.known():
            names.insert(0, home)  # the master has not heard of it yet; or nobody takes anything, and it says so best
        return [self._home if n == home else others[n] for n in names if n == home or n in others]

    def _known_elsewhere(
        self, keys: Sequence[str], options: PutOptions, results: list[Reservation | Put | MoonpoolError | None]
    ) -> None:
        """What some messenger holds need not be stored again, and a native page anywhere beats a converted one."""
        natives = [PageKey.parse(key) for key in keys]
        asked = [p.native.text if p and p.origin else key for p, key in zip(natives, keys, strict=True)]
        wanted = list(keys) + [a for a, k in zip(asked, keys, strict=True) if a != k]
        held = {k for k, names in zip(wanted, self._peers.holders(wanted), strict=True) if names}
        for i, (key, native) in enumerate(zip(keys, asked, strict=True)):
            if key in held and not options.replace:
                results[i] = Put.EXISTED
            elif native != key and native in held:
                results[i] = NativeExists("a native page is there; a converted one cannot replace it", key=key)

    def _reserve_on(
        self,
        target: Peer,
        items: Sequence[tuple[str, int]],
        wanting: list[int],
        options: PutOptions,
        state: tuple[dict[int, list[Part]], list[Reservation | Put | MoonpoolError | None], dict[int, MoonpoolError]],
    ) -> None:
        parts, results, refused = state
        try:
            link, reply = target.call(m.Reserve([items[i] for i in wanting], _wire(options, wanting)), m.Reserved)
        except AWAY as e:
            self._peers.forget_age()
            refused.update(dict.fromkeys(wanting, e))
            return
        spans = reply.spans([items[i][1] for i in wanting])
        if not link.hold(sum(isinstance(got, m.Span) for got in spans)):
            refused.update((i, _gave_up(items[i][0])) for i in wanting)
            return
        for i, got in zip(wanting, spans, strict=True):
            match got:
                case m.Span(id=handle, offset=offset, size=size):
                    parts[i].append(Part(target, link, handle, (offset, size)))
                case m.Existed():
                    self._give_back(parts[i])
                    results[i] = Put.EXISTED
                case m.Error():
                    error = _error(got)
                    if isinstance(error, _ELSEWHERE):
                        refused[i] = error
                    else:
                        self._give_back(parts[i])
                        results[i] = error

    def _reservation(
        self, key: str, parts: list[Part], copies: int, options: PutOptions, refused: MoonpoolError | None
    ) -> Reservation | MoonpoolError:
        if len(parts) == copies or (parts and not options.strict_replicas):
            return PoolReservation(key, parts, replace=options.replace, strict=options.strict_replicas)
        self._give_back(parts)
        return refused or ConnectionLost("no messenger takes it", key=key)

    # -- commit

    def commit(self, reservations: Sequence[PoolReservation]) -> list[PutOutcome]:
        try:
            return self._commit(reservations)
        finally:
            for r in reservations:
                r.let_go()

    def _commit(self, reservations: Sequence[PoolReservation]) -> list[PutOutcome]:
        failed = self._send([r for r in reservations if not r.complete])
        for r in reservations:
            r.end()  # before the object is visible: nobody may write to it then
        if all(len(r.parts) == 1 and not r.replace for r in reservations):
            return self._commit_parts([r.parts[0] for r in reservations], failed)
        parts = [part for r in reservations for part in r.parts]
        done = dict(zip(map(id, parts), self._commit_parts(parts, failed), strict=True))
        return [self._outcome(r, [done[id(part)] for part in r.parts]) for r in reservations]

    def _send(self, reservations: Sequence[PoolReservation]) -> dict[int, MoonpoolError]:
        """Make the copies that are not there yet. Why one could not be made, by the id() of its part."""
        failed: dict[int, MoonpoolError] = {}
        copies = [each for r in reservations for each in r.to_send()]
        for link, mine in _by_link(copies).items():
            results = link.memory.write([part.span for part, _ in mine], [value for _, value in mine])
            failed.update((id(part), e) for (part, _), e in zip(mine, results, strict=True) if e)
        return failed

    def _commit_parts(self, parts: Sequence[Part], failed: dict[int, MoonpoolError]) -> list[PutOutcome]:
        if not failed and len({part.link for part in parts}) == 1:
            return self._commit_on(parts[0].manager, parts[0].link, [part.id for part in parts])
        outcomes: dict[int, PutOutcome] = dict(failed)
        self._revoke_parts([p for p in parts if id(p) in failed])
        for link, mine in _by_link([(p, None) for p in parts if id(p) not in failed]).items():
            results = self._commit_on(mine[0][0].manager, link, [part.id for part, _ in mine])
            outcomes.update((id(part), o) for (part, _), o in zip(mine, results, strict=True))
        return [outcomes[id(p)] for p in parts]

    def _commit_on(self, manager: Peer, link: MessengerLink, ids: list[int]) -> list[PutOutcome]:
        try:
            reply = manager.call_on(link, m.Commit(ids), m.Committed)
        except AWAY as e:
            return [e for _ in ids]
        if reply.results is None:
            return [Put.STORED] * len(ids)
        return [Put.STORED if isinstance(r, m.Done) else _error(r) for r in reply.results]

    def _outcome(self, r: PoolReservation, outcomes: list[PutOutcome]) -> PutOutcome:
        bad = [o for o in outcomes if isinstance(o, MoonpoolError)]
        stored = [p for p, o in zip(r.parts, outcomes, strict=True) if o is Put.STORED]
        if bad and (r.strict or not stored):
            for part in stored:  # all or nothing
                with contextlib.suppress(*AWAY):
                    part.manager.call_on(part.link, m.Remove([r.key], True), m.Removals)
            return bad[0]
        if r.replace:
            self._remove_elsewhere(r.key, {p.link.name for p in stored})
        return Put.STORED

    def _remove_elsewhere(self, key: str, kept: set[str]) -> None:
        """An object that was replaced may have had copies that were not."""
        managers = {**self._peers.all(), self._peers.home: self._home}
        done = set(kept)
        while left := managers.keys() & set(self._peers.holders([key])[0]) - done:  # one may have been copied meanwhile
            for name in left:
                with contextlib.suppress(*AWAY):
                    managers[name].call(m.Remove([key], True), m.Removals)
            done |= left

    def revoke(self, reservations: Sequence[PoolReservation]) -> None:
        for r in reservations:
            r.end()
        try:
            self._revoke_parts([p for r in reservations for p in r.parts])
        finally:
            for r in reservations:
                r.let_go()

    def _give_back(self, parts: Sequence[Part]) -> None:
        """Of what became no reservation."""
        self._revoke_parts(parts)
        for part in parts:
            part.link.let_go()

    def _revoke_parts(self, parts: Sequence[Part]) -> None:
        for link, mine in _by_link([(p, None) for p in parts]).items():
            with contextlib.suppress(*AWAY):
                mine[0][0].manager.call_on(link, m.Revoke([part.id for part, _ in mine]), m.Done)


def _wire(options: PutOptions, wanting: Sequence[int] | None = None) -> PutOptions | None:
    """What the messenger must know of the options, for the items at `wanting`."""
    if options is PLAIN:
        return None
    groups = options.groups if wanting is None or not options.groups else [options.groups[i] for i in wanting]
    return PutOptions(
        pin=options.pin, soft_pin_ttl_s=options.soft_pin_ttl_s, groups=tuple(groups), replace=options.replace
    )


def _gave_up(key: str) -> MoonpoolError:
    return ConnectionLost("the connection was given up meanwhile", key=key)


def _error(message: m.Error) -> MoonpoolError:
    return from_fields(message.name, message.fields)


V = TypeVar("V")


def _by_link(parts: Iterable[tuple[Part, V]]) -> dict[MessengerLink, list[tuple[Part, V]]]:
    groups: dict[MessengerLink, list[tuple[Part, V]]] = {}
    for part, value in parts:
        groups.setdefault(part.link, []).append((part, value))
    return groups
