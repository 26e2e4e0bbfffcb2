"""The drift alarm, and how a process and the master keep up with the rules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

import pytest

from moonpool.c2c.config import C2CConfig
from moonpool.c2c.converter import Converter
from moonpool.c2c.shadow import CAP, MIN_CHECKS, WITHOUT_REPORT, DriftAlarm, sampled
from moonpool.c2c.standing import REFRESH_S, RuleDesk
from moonpool.errors import ConnectionLost, NotFound
from moonpool.store.embedded import EmbeddedPool
from moonpool.store.master.rules import RuleBook
from moonpool.store.master.service import MasterService
from moonpool.testing.fake_clock import FakeClock
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.types import Put, RuleStatus
from tests.c2c.pairs import BUNDLE, PAGE, config, identity_of, keys_of, model, random_kv, rule

SIGMA = 1.3
"""Of a log-normal whose 95th percentile is 3.6 times its mean."""


def kls(mean: float, count: int, seed: int = 0) -> Iterator[float]:
    random = Random(seed)
    return (mean * random.lognormvariate(-SIGMA * SIGMA / 2, SIGMA) for _ in range(count))


def checks_until_alarm(mean: float, limit: int, expected: float = 0.1, seed: int = 0) -> int | None:
    alarm = DriftAlarm(expected)
    return next((i for i, kl in enumerate(kls(mean, limit, seed), 1) if alarm.add(kl, True)), None)


def test_a_sound_rule_is_left_alone_and_so_is_one_that_is_twice_as_bad() -> None:
    assert checks_until_alarm(0.1, 20_000) is None
    assert checks_until_alarm(0.2, 1_000) is None


@pytest.mark.parametrize(("factor", "most"), [(5, 120), (10, 40), (100, 10)])
def test_drift_is_found_the_sooner_the_worse_it_is(factor: float, most: int) -> None:
    for seed in range(5):
        found = checks_until_alarm(0.1 * factor, 1000, seed=seed)
        assert found is not None
        assert MIN_CHECKS <= found <= most


def test_no_single_check_raises_the_alarm_and_a_nan_is_a_bad_one() -> None:
    alarm = DriftAlarm(0.1)
    assert not any(alarm.add(kl, True) for kl in [1e9, math.inf, math.nan])
    assert alarm.score == pytest.approx(3 * (CAP - 2.5))
    assert not any(alarm.add(0.05, True) for _ in range(20))


def test_the_alarm_says_why_once_and_can_be_restarted() -> None:
    alarm = DriftAlarm(0.1)
    raised = [alarm.add(1.0, i % 2 == 0) for i in range(10)]
    assert raised == [False] * 7 + [True] + [False] * 2
    assert alarm.raised == "drift: mean KL 1 over 8 shadow checks, 0.1 expected; first token agrees in 4"
    alarm.restart()
    assert not alarm.raised
    assert [alarm.add(1.0, True) for _ in range(5)] == [False] * 4 + [True], "the sums went on"


def test_a_rule_without_report_is_held_against_the_gates_own_bound() -> None:
    assert DriftAlarm(0.0).expected == WITHOUT_REPORT
    assert DriftAlarm(1e-9).expected == 0.01


def test_a_share_is_sampled() -> None:
    random = Random(1)
    assert 60 < sum(sampled(0.01, random) for _ in range(10_000)) < 140
    assert not any(sampled(0.0, random) for _ in range(100))
    assert all(sampled(1.0, random) for _ in range(100))


# -- what the master remembers

D1, D2 = "1" * 32, "2" * 32


def said(digest: str = D1, **changes: object) -> RuleStatus:
    return RuleStatus(name=f"rule {digest[0]}", digest=digest, **changes)  # type: ignore[arg-type]


def test_the_book_adds_up_who_said_what_and_keeps_the_last_verdict() -> None:
    book = RuleBook()
    book.report("converter", [said(state="ready", gate="forced", reason="why", pages=5), said(D2, state="loading")])
    book.report("engine a", [said(requests=3, checks=2, kl=0.5, agreed=1)])
    book.report("engine b", [said(requests=1, checks=1, kl=0.25)])
    book.report("engine a", [said(requests=4, checks=2, kl=0.5, agreed=1)])
    one, two = book.rules()
    assert (one.state, one.gate, one.reason, one.pages) == ("ready", "forced", "why", 5)
    assert (one.requests, one.checks, one.kl, one.agreed) == (5, 3, 0.75, 1)
    assert (two.state, two.requests) == ("loading", 0)
    book.disable(D1, "drift")
    book.disable(D1, "later")
    off = book.rules()[0]
    assert (off.state, off.reason, off.gate) == ("disabled", "drift", "forced")
    book.enable(D1)
    assert book.rules()[0].state == "ready"
    with pytest.raises(NotFound):
        book.enable(D1)


class Away(EmbeddedPool):
    """A pool whose master can be away, or be started anew."""

    away = False

    def report_rules(self, sender: str, rules: object) -> object:  # type: ignore[override]
        if self.away:
            raise ConnectionLost("away")
        return super().report_rules(sender, rules)  # type: ignore[arg-type]

    def disable_rule(self, digest: str, reason: str) -> None:
        if self.away:
            raise ConnectionLost("away")
        super().disable_rule(digest, reason)

    def restart_master(self) -> None:
        self.master = MasterService()
        assert self._master is not None
        self._master.close()


@pytest.fixture
def pool() -> Iterator[Away]:
    with Away(1 << 20) as pool:
        yield pool


def test_what_one_disables_all_hear_and_so_for_enabling(pool: Away) -> None:
    clock = FakeClock()
    one, two = RuleDesk(pool, "engine", clock), RuleDesk(pool, "converter", clock)
    one.tell([])
    two.tell([said(state="ready")])
    one.disable(D1, "drift")
    assert one.disabled == {D1: "drift"}
    assert not two.due()
    clock.advance(REFRESH_S)
    assert two.due()
    two.tell([])
    assert two.disabled == {D1: "drift"}
    assert two.seen(said()).state == "disabled"
    pool.enable_rule(D1)
    for desk in (one, two):
        desk.tell([])
        assert desk.disabled == {}


def test_a_master_that_is_away_hears_it_later(pool: Away) -> None:
    desk = RuleDesk(pool, "engine", FakeClock())
    desk.tell([])
    pool.away = True
    desk.disable(D1, "drift")
    assert desk.disabled == {D1: "drift"}, "here it holds at once"
    assert pool.master.rules().disabled == {}
    pool.away = False
    desk.tell([])
    assert pool.master.rules().disabled == desk.disabled == {D1: "drift"}
    pool.enable_rule(D1)
    desk.tell([])
    assert desk.disabled == {}


def test_a_master_that_was_started_anew_is_told_again(pool: Away) -> None:
    desk = RuleDesk(pool, "engine", FakeClock())
    desk.disable(D1, "drift")
    pool.restart_master()
    assert pool.master.rules().disabled == {}
    desk.tell([])
    assert pool.master.rules().disabled == desk.disabled == {D1: "drift"}


def test_the_masters_config_names_what_is_disabled() -> None:
    source, target = model("source"), model("target")
    conf = config(rule(source, target))
    assert conf.origins(target.owner) == (BUNDLE,)
    with EmbeddedPool(1 << 20, c2c_config=conf.encode()) as pool:
        assert C2CConfig.decode(pool.get_c2c_config()) == conf
        pool.disable_rule(BUNDLE, "by hand")
        found = C2CConfig.decode(pool.get_c2c_config())
    assert found.disabled == {BUNDLE: "by hand"}
    assert found.origins(target.owner) == found.origins(target.owner, True) == ()


def test_the_converter_makes_no_page_of_a_disabled_rule() -> None:
    source, target = model("source"), model("target")
    clock = FakeClock()
    keys = keys_of(source, 4 * PAGE)
    pages = random_kv(source.spec.page_shape(PAGE), 4)
    with no_leaks(), EmbeddedPool(4 << 20) as pool:
        converter = Converter(pool, config(rule(source, target)), load=lambda r, _: identity_of(r), clock=clock).start()
        try:
            converter.wait_ready(10)
            pool.disable_rule(BUNDLE, "by hand")
            clock.advance(REFRESH_S)
            assert eventually(lambda: converter.stats().rules[0].state == "disabled")
            assert pool.batch_put([k.text for k in keys[:2]], pages[:2]) == [Put.STORED] * 2
            assert eventually(lambda: converter.stats().rejected == {"rule_disabled": 2})
            pool.enable_rule(BUNDLE)
            clock.advance(REFRESH_S)
            assert eventually(lambda: converter.stats().rules[0].state == "ready")
            assert pool.batch_put([k.text for k in keys[2:]], pages[2:]) == [Put.STORED] * 2
            assert eventually(lambda: converter.stats().converted_pages == 2)
        finally:
            converter.close()
