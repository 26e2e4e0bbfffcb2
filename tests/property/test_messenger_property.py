"""The messenger's state against a model: a dict of what is visible, and what each session has open.

Bytes stand for themselves: a real segment would hold what the writer wrote at the object's offset, so the model keeps one.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.errors import KeyBusy, LeaseExpired, NativeExists, NoSpace, ObjectTooLarge
from moonpool.keys import PageKey
from moonpool.store.messenger.records import Limits, Reserved
from moonpool.store.messenger.state import MessengerState
from moonpool.testing.fake_clock import FakeClock
from moonpool.types import Put

CAPACITY = 4096
TTL = 10.0
NATIVE = [PageKey("a" * 32, i, f"{i:032x}") for i in range(3)]
KEYS = ["x", "y", "z", *(p.text for p in NATIVE), *(p.converted("b" * 32).text for p in NATIVE)]
sessions = st.integers(1, 3)
keys = st.sampled_from(KEYS)
sizes = st.sampled_from([0, 1, 64, 100, 1000, 2000, CAPACITY, CAPACITY + 1])


@dataclass
class Write:
    session: int
    key: str
    size: int
    offset: int
    fill: int
    expires: float


@dataclass
class Read:
    session: int
    spans: list[tuple[int, bytes]]


class Messenger(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.state = MessengerState(CAPACITY, self.clock, Limits(reservation_ttl_s=TTL, max_objects=6))
        self.memory = bytearray(CAPACITY)
        self.visible: dict[str, bytes] = {}
        self.writes: dict[int, Write] = {}
        self.owner: dict[str, int] = {}
        self.reads: dict[int, Read] = {}
        self.fills = 0

    def sync(self) -> None:
        """Eviction is the state's own choice: forget what went, but never what is being read."""
        self.visible = {k: v for k, v in self.visible.items() if self.state.exist([k])[0]}

    @rule(session=sessions, key=keys, size=sizes)
    def reserve(self, session: int, key: str, size: int) -> None:
        before = set(self.visible)
        got = self.state.reserve(session, key, size)
        page = PageKey.parse(key)
        busy = key in self.owner and self.clock.now() < self.writes[self.owner[key]].expires
        if key in before:
            assert got is Put.EXISTED
        elif page and page.origin and page.native.text in before:
            assert isinstance(got, NativeExists)
        elif busy:
            assert isinstance(got, KeyBusy)
        elif size > CAPACITY:
            assert isinstance(got, ObjectTooLarge)
        elif not isinstance(got, NoSpace):
            assert isinstance(got, Reserved)
            self.fills = self.fills % 255 + 1
            self.writes[got.id] = Write(session, key, size, got.offset, self.fills, self.clock.now() + TTL)
            self.owner[key] = got.id
        if isinstance(got, NoSpace | ObjectTooLarge | KeyBusy | NativeExists):
            assert all(self.state.exist(sorted(before))), "a put that was refused evicted something"
        self.sync()

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """Any writer may write at any time while it holds its reservation, also one whose key another took."""
        w = self.writes[data.draw(st.sampled_from(sorted(self.writes)))]
        self.memory[w.offset : w.offset + w.size] = bytes([w.fill]) * w.size

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), wrong_session=st.booleans())
    def commit(self, data: st.DataObject, wrong_session: bool) -> None:
        handle = data.draw(st.sampled_from(sorted(self.writes)))
        w = self.writes[handle]
        if wrong_session:
            assert isinstance(self.state.commit(w.session % 3 + 1, [handle])[0], LeaseExpired)
            return
        self.memory[w.offset : w.offset + w.size] = bytes([w.fill]) * w.size
        [got] = self.state.commit(w.session, [handle])
        del self.writes[handle]
        page = PageKey.parse(w.key)
        if self.owner.get(w.key) != handle:
            assert isinstance(got, LeaseExpired)
            return
        del self.owner[w.key]
        if page and page.origin and page.native.text in self.visible:
            assert isinstance(got, NativeExists)
            return
        assert got is Put.STORED
        self.visible[w.key] = bytes([w.fill]) * w.size
        if page and not page.origin:
            self.visible.pop(page.converted("b" * 32).text, None)

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.writes)))
        w = self.writes.pop(handle)
        self.state.revoke(w.session, [handle, handle])
        if self.owner.get(w.key) == handle:
            del self.owner[w.key]

    @rule(session=sessions, wanted=st.lists(keys, max_size=4))
    def open_read(self, session: int, wanted: list[str]) -> None:
        handle, spans = self.state.open_read(session, wanted)
        assert [s is not None for s in spans] == [k in self.visible for k in wanted]
        held = [(s[0], self.visible[k]) for k, s in zip(wanted, spans, strict=True) if s is not None]
        assert [s[1] for s in spans if s] == [len(b) for _, b in held]
        if held:
            self.reads[handle] = Read(session, held)

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def close_read(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.reads)))
        self.state.close_read(self.reads.pop(handle).session, [handle, handle])

    @rule(wanted=st.lists(keys, max_size=3))
    def remove(self, wanted: list[str]) -> None:
        assert [bool(r) for r in self.state.remove(wanted)] == [self.visible.pop(k, None) is not None for k in wanted]

    @rule(session=sessions)
    def end_session(self, session: int) -> None:
        self.state.release(self.state.end_session(session))
        self.reads = {h: r for h, r in self.reads.items() if r.session != session}
        self.writes = {h: w for h, w in self.writes.items() if w.session != session}
        self.owner = {k: h for k, h in self.owner.items() if h in self.writes}

    @rule(seconds=st.sampled_from([1.0, TTL]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def bytes_are_right(self) -> None:
        for read in self.reads.values():
            for offset, expected in read.spans:
                assert self.memory[offset : offset + len(expected)] == expected, "changed under an open read"
        for key, expected in self.visible.items():
            _, [span] = (opened := self.state.open_read(99, [key]))
            assert span is not None
            assert self.memory[span[0] : span[0] + span[1]] == expected
            self.state.close_read(99, [opened[0]])

    @invariant()
    def books_balance(self) -> None:
        self.state.check_integrity()
        stats = self.state.stats()
        assert stats.objects == len(self.visible) <= 6
        assert stats.reads_open == len(self.reads)
        assert stats.writes_open == len(self.writes)
        assert sorted(self.state.keys()) == sorted(self.visible)

    def teardown(self) -> None:
        for session in (1, 2, 3, 99):
            self.state.release(self.state.end_session(session))
        self.state.remove(KEYS)
        assert self.state.stats().used == 0


Messenger.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestMessenger = Messenger.TestCase
