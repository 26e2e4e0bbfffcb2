"""The converter over a real embedded pool: what sets it off, what it makes, what it refuses, what it never does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from moonpool.c2c.config import C2CConfig, Rule
from moonpool.c2c.convert import Conversion
from moonpool.c2c.converter import Converter
from moonpool.c2c.pages import pack
from moonpool.c2c.projectors.identity import IdentityParameters, IdentityProjector
from moonpool.errors import ConversionRefused
from moonpool.keys import PageKey
from moonpool.store.embedded import EmbeddedPool
from moonpool.testing.fake_clock import FakeClock
from moonpool.types import Put
from tests.c2c.pairs import BUNDLE, PAGE, config, identity_of, keys_of, model, random_kv, rule, spec

SOURCE, TARGET, OTHER = model("source"), model("target"), model("other")
SHAPE = SOURCE.spec.page_shape(PAGE)
PAGES = random_kv(SHAPE, 5)
SOURCE_KEYS, TARGET_KEYS = keys_of(SOURCE, 5 * PAGE), keys_of(TARGET, 5 * PAGE)

Load: TypeAlias = Callable[[Rule], Conversion]


@contextmanager
def running(
    conf: C2CConfig, load: Load = identity_of, clock: FakeClock | None = None
) -> Iterator[tuple[EmbeddedPool, Converter]]:
    with EmbeddedPool(8 << 20) as pool:
        converter = Converter(pool, conf, load=lambda rule, _: load(rule), clock=clock).start()
        try:
            converter.wait_ready(10)
            yield pool, converter
        finally:
            converter.close()
            pool.service.check_integrity()
            assert pool.stats().reads_open == pool.stats().writes_open == 0


def put_source(pool: EmbeddedPool, pages: list[bytearray] = PAGES) -> None:
    assert pool.batch_put([k.text for k in SOURCE_KEYS[: len(pages)]], pages) == [Put.STORED] * len(pages)


def eventually(condition: Callable[[], bool], timeout: float = 10.0) -> bool:
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def converted(pool: EmbeddedPool, keys: list[PageKey] = TARGET_KEYS, digest: str = BUNDLE) -> list[bool]:
    return pool.batch_is_exist([k.converted(digest).text for k in keys])


def settled(converter: Converter, pages: int) -> bool:
    """All events were seen and everything that was asked for has ended, this many pages in all."""

    def done() -> bool:
        stats = converter.stats()
        return stats.converted_pages + sum(stats.rejected.values()) >= pages and converter.wait_idle(0)

    return eventually(done)


def test_on_put_converts_all_pages_but_the_first_and_identity_keeps_every_bit() -> None:
    with running(config(rule(SOURCE, TARGET))) as (pool, converter):
        put_source(pool)
        assert settled(converter, 5)
        assert converted(pool) == [False, True, True, True, True]
        for key, page in zip(TARGET_KEYS[1:], PAGES[1:], strict=True):
            assert pool.get(key.converted(BUNDLE).text) == bytes(page)
        assert converter.stats().rejected == {"first_page": 1}


def test_a_plain_lookup_never_sees_a_converted_page() -> None:
    with running(config(rule(SOURCE, TARGET))) as (pool, converter):
        put_source(pool)
        assert settled(converter, 5)
        assert pool.lookup(TARGET_KEYS) == [None] * 5
        assert not any(pool.batch_is_exist([k.text for k in TARGET_KEYS]))
        found = pool.lookup(TARGET_KEYS, [BUNDLE])
        assert [f.converted if f else None for f in found] == [None, True, True, True, True]


def test_on_miss_converts_only_what_a_lookup_missed() -> None:
    with running(config(rule(SOURCE, TARGET, mode="on_miss"))) as (pool, converter):
        put_source(pool)
        assert pool.lookup(TARGET_KEYS[:3], [BUNDLE]) == [None] * 3
        assert settled(converter, 3)
        assert converted(pool) == [False, True, True, False, False]


def test_hint_converts_only_what_was_hinted() -> None:
    with running(config(rule(SOURCE, TARGET, mode="hint"))) as (pool, converter):
        put_source(pool)
        pool.lookup(TARGET_KEYS, [BUNDLE])
        pool.hint(TARGET_KEYS[2:3])
        assert settled(converter, 1)
        assert converted(pool) == [False, False, True, False, False]


def test_several_targets_of_one_source() -> None:
    other = "c" * 32
    with running(config(rule(SOURCE, TARGET), rule(SOURCE, OTHER, digest=other))) as (pool, converter):
        put_source(pool)
        assert settled(converter, 10)
        assert converted(pool) == converted(pool, keys_of(OTHER, 5 * PAGE), other) == [False, True, True, True, True]


def test_salted_pages_are_recognised_and_stay_apart() -> None:
    mine = SOURCE.spec.identity(PAGE, salt="mine").page_keys(range(2 * PAGE))
    theirs = TARGET.spec.identity(PAGE, salt="theirs").page_keys(range(2 * PAGE))
    ours = TARGET.spec.identity(PAGE, salt="mine").page_keys(range(2 * PAGE))
    with running(config(rule(SOURCE, TARGET))) as (pool, converter):
        pool.batch_put([k.text for k in mine], PAGES[:2])
        assert settled(converter, 2)
        assert converted(pool, ours) == [False, True]
        assert converted(pool, theirs) == [False, False]


def test_a_native_page_wins_before_and_after() -> None:
    with running(config(rule(SOURCE, TARGET))) as (pool, converter):
        pool.put(TARGET_KEYS[1].text, PAGES[0])
        put_source(pool)
        assert settled(converter, 5)
        assert converted(pool) == [False, False, True, True, True]
        assert converter.stats().rejected["NativeExists"] == 1
        pool.put(TARGET_KEYS[2].text, PAGES[0])
        assert converted(pool) == [False, False, False, True, True]
        match = pool.lookup(TARGET_KEYS[2:3], [BUNDLE])[0]
        assert match == (TARGET_KEYS[2].text, False)


def test_converted_pages_are_not_converted_again() -> None:
    chain = config(rule(SOURCE, TARGET), rule(TARGET, OTHER, digest="c" * 32))
    with running(chain) as (pool, converter):
        put_source(pool)
        assert settled(converter, 5)
        assert not any(converted(pool, keys_of(OTHER, 5 * PAGE), "c" * 32))


def test_other_models_pages_and_foreign_keys_are_left_alone() -> None:
    stranger = model("source2", spec("source2"))
    with running(config(rule(SOURCE, TARGET))) as (pool, converter):
        pool.batch_put([k.text for k in keys_of(stranger, 2 * PAGE)], PAGES[:2])
        pool.put("any other key", b"x")
        put_source(pool, PAGES[:2])
        assert settled(converter, 2)
        assert converter.stats().converted_pages == 1


def test_a_bad_page_is_refused_and_the_others_are_made() -> None:
    poisoned = torch.full((PAGE, SHAPE.layers, SHAPE.heads, SHAPE.dim), 1.0)
    poisoned[1, 0, 0, 3] = float("nan")
    pages = [*PAGES[:2], pack(poisoned, poisoned), bytearray(10), PAGES[4]]
    with running(config(rule(SOURCE, TARGET))) as (pool, converter):
        put_source(pool, pages)
        assert settled(converter, 5)
        assert converted(pool) == [False, True, False, False, True]
        assert converter.stats().rejected == {"first_page": 1, "ConversionRefused": 1, "WrongSize": 1}


def test_a_refused_rule_says_why_and_harms_nobody() -> None:
    def refuse(_: Rule) -> Conversion:
        raise ConversionRefused("the models differ in tokenizer", need="a", have="b")

    def load(r: Rule) -> Conversion:
        return refuse(r) if r.target is OTHER else identity_of(r)

    with running(config(rule(SOURCE, OTHER), rule(SOURCE, TARGET)), load) as (pool, converter):
        put_source(pool)
        assert settled(converter, 10)
        bad, good = converter.stats().rules
        assert (bad.state, good.state) == ("refused", "ready")
        assert "tokenizer" in bad.reason
        assert converter.stats().rejected["rule_refused"] == 5
        assert converter.stats().converted_pages == 4


class _Gate(IdentityProjector):
    """Converts only when it is told to."""

    def __init__(self) -> None:
        super().__init__(IdentityParameters(layers=SHAPE.layers, width=SHAPE.width))
        self.open, self.entered = threading.Event(), threading.Event()

    def project(self, x: Tensor) -> Tensor:
        self.entered.set()
        assert self.open.wait(10)
        return super().project(x)


@pytest.fixture
def gate() -> _Gate:
    return _Gate()


def gated(gate: _Gate) -> Load:
    return lambda r: Conversion(gate, r.source.spec, r.target.spec, PAGE)


def test_neither_putter_nor_reader_waits_for_a_conversion(gate: _Gate) -> None:
    with running(config(rule(SOURCE, TARGET)), gated(gate)) as (pool, converter):
        put_source(pool, PAGES[:2])
        assert gate.entered.wait(10)
        pool.put(SOURCE_KEYS[2].text, PAGES[2])  # returns although the only worker is stuck
        assert pool.lookup(TARGET_KEYS[:2], [BUNDLE]) == [None, None]
        gate.open.set()
        assert settled(converter, 3)


def test_one_page_is_converted_once_however_often_it_is_asked_for(gate: _Gate) -> None:
    with running(config(rule(SOURCE, TARGET)), gated(gate)) as (pool, converter):
        put_source(pool, PAGES[:2])
        assert gate.entered.wait(10)
        for _ in range(3):
            pool.lookup(TARGET_KEYS[1:2], [BUNDLE])
        assert eventually(lambda: converter.stats().rejected.get("joined", 0) == 3)
        gate.open.set()
        assert settled(converter, 5)
        assert converter.stats().converted_pages == 1


def test_overload_is_a_miss_not_a_wait(gate: _Gate) -> None:
    with running(config(rule(SOURCE, TARGET), queue_pages=2), gated(gate)) as (pool, converter):
        put_source(pool, PAGES[:2])
        assert gate.entered.wait(10)
        for key, page in zip(SOURCE_KEYS[2:], PAGES[2:], strict=True):  # one by one: the event queue is as small
            pool.put(key.text, page)
            assert eventually(lambda: pool.stats().events_dropped == 0)
            time.sleep(0.02)
        assert eventually(lambda: converter.stats().rejected.get("overload", 0) == 1)
        gate.open.set()
        assert settled(converter, 5)
        assert sum(converted(pool)) == 3


def test_late_work_is_dropped(gate: _Gate) -> None:
    clock = FakeClock()
    with running(config(rule(SOURCE, TARGET, deadline_s=5)), gated(gate), clock) as (pool, converter):
        put_source(pool, PAGES[:2])
        assert gate.entered.wait(10)
        pool.put(SOURCE_KEYS[2].text, PAGES[2])
        assert eventually(lambda: converter.stats().waiting_pages == 1)
        clock.advance(6)
        gate.open.set()
        assert settled(converter, 3)
        assert converter.stats().rejected["late"] == 1
        assert converted(pool)[:3] == [False, True, False]


def test_a_fault_in_one_batch_does_not_end_the_worker() -> None:
    class Faulty(IdentityProjector):
        calls = 0

        def project(self, x: Tensor) -> Tensor:
            Faulty.calls += 1
            if Faulty.calls == 1:
                raise RuntimeError("a bug")
            return super().project(x)

    faulty = Faulty(IdentityParameters(layers=SHAPE.layers, width=SHAPE.width))
    with running(config(rule(SOURCE, TARGET)), lambda r: Conversion(faulty, r.source.spec, r.target.spec, PAGE)) as (
        pool,
        converter,
    ):
        put_source(pool, PAGES[:2])
        assert eventually(lambda: converter.stats().rejected.get("internal", 0) == 1)
        pool.put(SOURCE_KEYS[2].text, PAGES[2])
        assert eventually(lambda: converter.stats().converted_pages == 1)


def test_the_rules_decide_what_a_lookup_may_take() -> None:
    conf = config(rule(SOURCE, TARGET), rule(OTHER, TARGET, serve="on_request", digest="c" * 32))
    owner = TARGET.owner
    assert conf.origins(owner) == (BUNDLE,)
    assert conf.origins(owner, True) == (BUNDLE, "c" * 32)
    assert conf.origins(owner, False) == ()
    assert conf.origins(SOURCE.owner, True) == ()
    assert C2CConfig.decode(conf.encode()) == conf
