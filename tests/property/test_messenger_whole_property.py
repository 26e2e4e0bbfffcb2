"""The messenger's state with all that Part 2 gave it, against a model: tenants and quotas, pins, groups, replacing, batches,
quarantine, and a tier below.

Bytes stand for themselves: `memory` is the segment, and whoever holds space may write to it at any time.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.errors import Draining, KeyBusy, LeaseExpired, MoonpoolError, NoSpace, ObjectTooLarge, QuotaExceeded
from moonpool.store.messenger.allocator import rounded
from moonpool.store.messenger.objects import Object
from moonpool.store.messenger.records import Limits, Reserved, Row
from moonpool.store.messenger.state import MessengerState
from moonpool.store.messenger.tenants import scoped, tenant_of
from moonpool.testing.fake_clock import FakeClock
from moonpool.types import Pin, Put, PutOptions, Removed

CAPACITY = 4096
TTL, SOFT = 10.0, 15.0
MOST = 8
TENANTS = ("", "t")
KEYS = [full for tenant in TENANTS for full in scoped(tenant, ["a", "b", "c", "d"])]
sessions = st.integers(1, 3)
keys = st.sampled_from(KEYS)
sizes = st.sampled_from([0, 1, 64, 100, 500, 1000, 2000, CAPACITY, CAPACITY + 1])
options = st.builds(PutOptions, pin=st.sampled_from(Pin), soft_pin_ttl_s=st.just(SOFT), replace=st.booleans())
groups = st.sampled_from(["", "", "g", "h"])


class Disk(dict[str, bytes]):
    """The tier below."""

    def size(self, key: str) -> int | None:
        return len(self[key]) if key in self else None


@dataclass
class Write:
    session: int
    key: str
    size: int
    offset: int
    fill: int
    expires: float
    options: PutOptions


class Whole(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock, self.disk = FakeClock(), Disk()
        limits = Limits(reservation_ttl_s=TTL, max_objects=MOST, max_soft_pin_s=SOFT)
        self.state = MessengerState(CAPACITY, self.clock, limits, self.disk)
        self.memory = bytearray(CAPACITY)
        self.visible: dict[str, bytes] = {}
        self.hard: set[str] = set()
        self.writes: dict[int, Write] = {}
        self.owner: dict[str, int] = {}
        self.reads: dict[int, tuple[int, list[tuple[int, bytes]]]] = {}
        self.held: list[tuple[list[Object], list[tuple[int, int, int]]]] = []
        """In quarantine, and where their dead writers may still write what."""
        self.backing: list[tuple[Object, bytes]] = []
        self.loading: tuple[int, Write, bytes] | None = None
        self.cancelled = False
        """What was being loaded was removed meanwhile."""
        self.quotas: dict[str, int] = {}
        self.fills = 0

    # -- helpers

    def in_memory(self, key: str) -> bool:
        return self.state.find(key) is not None

    def sync(self) -> None:
        """Eviction is the state's own choice, but hard-pinned objects stay, and so does what the tier below has."""
        gone = [k for k in self.visible if not self.state.exist([k])[0]]
        assert not self.hard & set(gone), "a hard-pinned object was evicted"
        assert not [k for k in gone if k in self.disk]
        for k in gone:
            del self.visible[k]

    def next_fill(self) -> int:
        self.fills = self.fills % 255 + 1
        return self.fills

    def write(self, w: Write) -> None:
        self.memory[w.offset : w.offset + w.size] = bytes([w.fill]) * w.size

    def refused(self, got: object, before: set[str]) -> None:
        if isinstance(got, MoonpoolError):
            assert before <= {k for k in KEYS if self.in_memory(k)}, (
                f"a put that was refused ({got!r}) evicted something"
            )

    def held_of(self, tenant: str) -> int:
        visible = sum(len(v) for k, v in self.visible.items() if tenant_of(k) == tenant and self.in_memory(k))
        return visible + sum(w.size for w in self.writes.values() if tenant_of(w.key) == tenant)

    # -- writing

    @rule(key=keys, size=sizes, how=options, group=groups)
    def reserve(self, key: str, size: int, how: PutOptions, group: str) -> None:
        session = 1 if tenant_of(key) else 2  # a session is of one tenant
        before = {k for k in KEYS if self.in_memory(k)}
        got = self.state.reserve(session, key, size, how, group)
        busy = key in self.owner and self.clock.now() < self.writes[self.owner[key]].expires
        if key in self.visible and not how.replace:
            assert got is Put.EXISTED
        elif self.state.draining:
            assert isinstance(got, Draining)
        elif busy or (self.loading and self.loading[1].key == key and not self.cancelled):
            assert isinstance(got, KeyBusy)
        elif size > CAPACITY:
            assert isinstance(got, ObjectTooLarge)
        else:
            assert isinstance(got, Reserved | NoSpace | QuotaExceeded)
        self.refused(got, before)
        if isinstance(got, Reserved):
            self.take(got.id, Write(session, key, size, got.offset, self.next_fill(), self.clock.now() + TTL, how))
        self.sync()

    def take(self, handle: int, w: Write) -> None:
        self.writes[handle] = w
        self.owner[w.key] = handle
        limit = self.quotas.get(tenant_of(w.key))
        self.sync()
        assert limit is None or self.held_of(tenant_of(w.key)) <= limit, "over the quota"

    @rule(session=sessions, wanted=st.lists(st.tuples(keys, st.sampled_from([0, 1, 64, 100, 300])), max_size=4))
    def reserve_batch(self, session: int, wanted: list[tuple[str, int]]) -> None:
        wanted = [(k, size) for k, size in wanted if tenant_of(k) == TENANTS[session % 2]]
        got = self.state.reserve_all(session, wanted)
        if isinstance(got, Row):
            offset, rows = got.offset, []
            for i, (_, size) in enumerate(wanted):
                rows.append(Reserved(got.id + i, offset, size))
                offset += rounded(size)
            assert not [k for k, _ in wanted if k in self.visible], "a batch took a key that was there"
            results: list[object] = list(rows)
        else:
            results = list(got)
        for (key, size), one in zip(wanted, results, strict=True):
            if isinstance(one, Reserved):
                w = Write(session, key, size, one.offset, self.next_fill(), self.clock.now() + TTL, PutOptions())
                self.writes[one.id], self.owner[key] = w, one.id
        self.sync()

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        self.write(self.writes[data.draw(st.sampled_from(sorted(self.writes)))])

    @precondition(lambda self: self.held)
    @rule()
    def a_dead_writer_writes(self) -> None:
        for _, places in self.held:
            for offset, size, fill in places:
                self.memory[offset : offset + size] = bytes([fill]) * size

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        session = self.writes[data.draw(st.sampled_from(sorted(self.writes)))].session
        mine = [h for h, w in sorted(self.writes.items()) if w.session == session]
        handles = data.draw(st.lists(st.sampled_from(mine), min_size=1, unique=True))
        for h in handles:
            self.write(self.writes[h])
        self.drop_replaced(session, handles)
        for handle, got in zip(handles, self.state.commit(session, handles), strict=True):
            w = self.writes.pop(handle)
            if self.owner.get(w.key) != handle:
                assert isinstance(got, LeaseExpired)
                continue
            del self.owner[w.key]
            assert got is Put.STORED
            self.visible[w.key] = bytes([w.fill]) * w.size
            (self.hard.add if w.options.pin is Pin.HARD else self.hard.discard)(w.key)
        self.sync()

    def drop_replaced(self, session: int, handles: list[int]) -> None:
        for key in self.state.replaced_below(session, handles):
            del self.disk[key]
            self.state.gone_below([key])
        self.sync()

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def is_about_to_commit(self, data: st.DataObject) -> None:
        """The copies below go before the commit, not in one step with it."""
        handle = data.draw(st.sampled_from(sorted(self.writes)))
        self.drop_replaced(self.writes[handle].session, [handle])

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.writes)))
        w = self.writes.pop(handle)
        self.state.revoke(w.session, [handle, handle])
        if self.owner.get(w.key) == handle:
            del self.owner[w.key]

    @rule(tenant=st.sampled_from(TENANTS), limit=st.sampled_from([None, 0, 1000, 3000]))
    def set_quota(self, tenant: str, limit: int | None) -> None:
        self.quotas.pop(tenant, None)
        if limit is not None:
            self.quotas[tenant] = limit
        self.state.set_quotas(self.quotas)

    @rule(on=st.booleans())
    def drain(self, on: bool) -> None:
        self.state.draining = on

    # -- reading, removing

    @rule(session=sessions, wanted=st.lists(keys, max_size=4))
    def open_read(self, session: int, wanted: list[str]) -> None:
        handle, spans = self.state.open_read(session, wanted)
        assert [s is not None for s in spans] == [self.in_memory(k) for k in wanted]
        held = [(s[0], self.visible[k]) for k, s in zip(wanted, spans, strict=True) if s]
        assert [s[1] for s in spans if s] == [len(b) for _, b in held]
        if held:
            self.reads[handle] = (session, held)

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def close_read(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.reads)))
        assert self.state.close_read(self.reads.pop(handle)[0], [handle, handle]) == [True, False]

    @rule(wanted=st.lists(keys, max_size=3, unique=True), force=st.booleans())
    def remove(self, wanted: list[str], force: bool) -> None:
        for key, got in zip(wanted, self.state.remove(wanted, force=force), strict=True):
            assert (got is Removed.PINNED) == (key in self.hard and not force)
            if self.loading and self.loading[1].key == key:
                self.cancelled = True
            if got is not Removed.PINNED:
                self.disk.pop(key, None)
                self.visible.pop(key, None)
                self.hard.discard(key)
        self.state.gone_below(wanted)

    # -- sessions

    @rule(session=sessions)
    def end_session(self, session: int) -> None:
        if self.loading and self.loading[1].session == session:
            self.end_load(works=False)  # the thread that loads is the session's own
        unfinished = self.state.end_session(session)
        ended = {h: w for h, w in self.writes.items() if w.session == session}
        assert sorted(o.key for o in unfinished) == sorted(w.key for w in ended.values())
        self.held.append((unfinished, [(w.offset, w.size, w.fill) for w in ended.values()]))
        self.reads = {h: r for h, r in self.reads.items() if r[0] != session}
        self.writes = {h: w for h, w in self.writes.items() if w.session != session}
        self.owner = {k: h for k, h in self.owner.items() if h in self.writes}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        unfinished, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.state.release(unfinished)

    # -- the tier below

    @rule(limit=st.sampled_from([1, 1000, CAPACITY]))
    def begin_backing(self, limit: int) -> None:
        for obj in self.state.take_unbacked(limit):
            self.backing.append((obj, bytes(self.memory[obj.offset : obj.offset + obj.size])))

    @precondition(lambda self: self.backing)
    @rule(works=st.booleans())
    def end_backing(self, works: bool) -> None:
        for obj, before in self.backing:
            assert self.memory[obj.offset : obj.offset + obj.size] == before, "changed while it was copied down"
            if works and self.state.copied(obj):
                self.disk[obj.key] = before
        self.state.backed([obj for obj, _ in self.backing])
        self.backing = []

    @rule(key=keys)
    def the_disk_drops(self, key: str) -> None:
        if self.disk.pop(key, None) is not None:
            self.state.gone_below([key])
            self.sync()

    @precondition(lambda self: self.loading is None)
    @rule(session=sessions, key=keys)
    def begin_load(self, session: int, key: str) -> None:
        before = {k for k in KEYS if self.in_memory(k)}
        got = self.state.begin_load(session, key)
        if got is None:
            assert self.in_memory(key) or key not in self.disk
            return
        self.refused(got, before)
        if isinstance(got, Reserved):
            value = self.disk[key]
            assert got.size == len(value)
            w = Write(session, key, got.size, got.offset, 0, float("inf"), PutOptions())
            self.loading, self.cancelled = (got.id, w, value), False
        self.sync()

    @precondition(lambda self: self.loading)
    @rule(works=st.booleans())
    def end_load(self, works: bool) -> None:
        assert self.loading
        handle, w, value = self.loading
        self.loading = None
        if not works:
            self.state.revoke(w.session, [handle])
            if self.cancelled:
                return
            self.disk.pop(w.key, None)
            self.state.gone_below([w.key])
        elif self.cancelled:
            assert self.state.end_load(w.session, handle, 0) == (0, None), "what was removed came back"
        else:  # it was read; that the tier below has dropped it since does not matter
            self.visible[w.key] = value

            self.memory[w.offset : w.offset + w.size] = value
            lease, span = self.state.end_load(w.session, handle, 0)
            assert span == (w.offset, w.size)
            self.reads[lease] = (w.session, [(w.offset, value)])
        self.sync()

    @rule(seconds=st.sampled_from([1.0, TTL]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # -- what must hold

    @invariant()
    def bytes_are_right(self) -> None:
        for _, spans in self.reads.values():
            for offset, expected in spans:
                assert self.memory[offset : offset + len(expected)] == expected, "changed under an open read"
        for key, expected in self.visible.items():
            if obj := self.state.find(key):
                assert self.memory[obj.offset : obj.offset + obj.size] == expected
            else:
                assert self.disk[key] == expected, "the copy below is another version"

    @invariant()
    def books_balance(self) -> None:
        self.state.check_integrity()
        stats = self.state.stats()
        assert stats.objects <= MOST
        assert stats.reads_open == len(self.reads)
        assert stats.writes_open == len(self.writes) + (self.loading is not None)
        assert {k for k in KEYS if self.state.has(k)} == set(self.visible)

    @invariant()
    def the_index_hears_of_everything(self) -> None:
        """What `take_changes` gave, one after the other, is what is there."""
        changes = self.state.take_changes()
        assert not changes.lost
        self.index = {**getattr(self, "index", {}), **changes.there}
        assert {k for k, there in self.index.items() if there} == set(self.visible)

    def teardown(self) -> None:
        self.end_load(works=False) if self.loading else None
        self.state.backed([obj for obj, _ in self.backing])
        for unfinished, _ in self.held:
            self.state.release(unfinished)
        for session in (1, 2, 3):
            self.state.release(self.state.end_session(session))
        self.disk.clear()
        self.state.remove(KEYS, force=True)
        assert self.state.stats().used == 0


Whole.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestWhole = Whole.TestCase
