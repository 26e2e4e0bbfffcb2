"""The master's index against a model: who is alive, who holds what, what is cleared away, quotas."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonpool.errors import NotFound
from moonpool.store.master import state as master
from moonpool.store.master.state import MasterState
from moonpool.testing.fake_clock import FakeClock
from moonpool.types import MessengerInfo

EXPIRY = 10.0
NAMES = ["m0", "m1", "m2"]
KEYS = [f"k{i}" for i in range(8)]
TENANTS = ["", "t"]
names, keys = st.sampled_from(NAMES), st.lists(st.sampled_from(KEYS), max_size=6)


class Index(RuleBasedStateMachine):
    """`alive` maps a messenger to its generation, the time of its last sign of life, and what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.state = MasterState(self.clock, expiry_s=EXPIRY)
        self.alive: dict[str, tuple[str, float, set[str]]] = {}
        self.figures: dict[str, dict[str, int]] = {}
        self.limits: dict[str, int] = {}
        self.checked = self.clock.now()
        self.generations = 0

    def expire(self) -> None:
        """What any look at the members does first."""
        now = self.clock.now()
        if now - self.checked > EXPIRY:  # the master's own stall
            self.alive = {n: (g, now, held) for n, (g, _, held) in self.alive.items()}
        self.checked = now
        for name in [n for n, (_, seen, _) in self.alive.items() if now - seen > EXPIRY]:
            self.forget_in_model(name)

    def forget_in_model(self, name: str) -> None:
        del self.alive[name]
        self.figures.pop(name, None)

    @rule(name=names)
    def register(self, name: str) -> None:
        self.generations += 1
        generation = f"g{self.generations}"
        self.state.register(MessengerInfo(name=name, socket=f"/{generation}"), generation)
        self.alive[name] = (generation, self.clock.now(), set())
        self.figures.pop(name, None)

    @rule(name=names)
    def seen(self, name: str) -> None:
        assert self.state.seen(name) == (name in self.alive)
        self.sign_of_life(name)

    def sign_of_life(self, name: str) -> None:
        if name in self.alive:
            generation, _, held = self.alive[name]
            self.alive[name] = (generation, self.clock.now(), held)

    @rule(name=names, added=keys, removed=keys)
    def publish(self, name: str, added: list[str], removed: list[str]) -> None:
        try:
            self.state.publish(name, added, removed)
        except NotFound:
            assert name not in self.alive
            return
        self.sign_of_life(name)
        held = self.alive[name][2]
        held.difference_update(removed)
        held.update(added)

    @rule(name=names, figures=st.dictionaries(st.sampled_from(TENANTS), st.integers(0, 100)))
    def report(self, name: str, figures: dict[str, int]) -> None:
        if name not in self.alive:
            return
        self.state.report(MessengerInfo(name=name, socket=f"/{self.alive[name][0]}"), figures)
        self.figures[name] = figures

    @rule(name=names, which=st.sampled_from(["this", "a former", "any"]))
    def forget(self, name: str, which: str) -> None:
        there = self.alive.get(name)
        generation = {"this": there[0] if there else "g", "a former": "g0", "any": ""}[which]
        self.state.forget(name, generation)
        if there and which != "a former":
            self.forget_in_model(name)

    @rule(seconds=st.sampled_from([0.5, 4.0, EXPIRY + 1]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def tick(self) -> None:
        self.state.tick()
        self.expire()

    @rule(asked=keys)
    def locate(self, asked: list[str]) -> None:
        found = self.state.locate(asked)
        self.expire()
        assert found == [sorted(n for n, (_, _, held) in self.alive.items() if k in held) for k in asked]

    @rule()
    def members(self) -> None:
        found = self.state.messengers()
        self.expire()
        assert [(i.name, i.socket) for i in found] == [(n, f"/{self.alive[n][0]}") for n in sorted(self.alive)]

    @rule(tenant=st.sampled_from(TENANTS), limit=st.none() | st.integers(0, 200))
    def set_quota(self, tenant: str, limit: int | None) -> None:
        self.state.set_quota(tenant, limit)
        self.limits.pop(tenant, None)
        if limit is not None:
            self.limits[tenant] = limit

    @invariant()
    def quotas_are_shared(self) -> None:
        used = {t: sum(f.get(t, 0) for f in self.figures.values()) for t in TENANTS}
        for name in NAMES:
            mine = self.figures.get(name, {})
            wanted = {t: max(0, limit - used[t] + mine.get(t, 0)) for t, limit in self.limits.items()}
            assert self.state.quotas_for(name) == wanted

    @invariant()
    def books_balance(self) -> None:
        self.state.check_integrity()

    def teardown(self) -> None:
        for name in NAMES:
            self.state.forget(name)
        for _ in range(len(KEYS) * (self.generations + 1)):
            self.state.tick()
        assert self.state.keys == 0, "what forgotten messengers held is cleared away"
        assert self.state.locate(KEYS) == [[] for _ in KEYS]


class SmallSteps(Index):
    """Cleared away two keys at a time, so that much happens in between."""

    def __init__(self) -> None:
        super().__init__()
        self._sweep = master._SWEEP
        master._SWEEP = 2

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            master._SWEEP = self._sweep


SmallSteps.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestIndex = SmallSteps.TestCase
