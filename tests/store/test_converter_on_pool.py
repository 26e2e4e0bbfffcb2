"""The converter on whichever pool the run chose: a source page goes in, the target's lookup finds it converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from moonpool.c2c.config import C2CConfig
from moonpool.c2c.converter import Converter
from moonpool.store.base import KVPool, Match
from moonpool.testing.leaks import eventually
from moonpool.types import Put
from tests.c2c.pairs import BUNDLE, PAGE, config, identity_of, keys_of, model, random_kv, rule

SOURCE, TARGET = model("source"), model("target")
SHAPE = SOURCE.spec.page_shape(PAGE)
PAGES = random_kv(SHAPE, 5)
SOURCE_KEYS, TARGET_KEYS = keys_of(SOURCE, 5 * PAGE), keys_of(TARGET, 5 * PAGE)


@pytest.fixture
def pool(fresh: Callable[[int], KVPool]) -> KVPool:
    return fresh(8 << 20)


@contextmanager
def converting(pool: KVPool, conf: C2CConfig) -> Iterator[Converter]:
    converter = Converter(pool, conf, load=lambda r, _: identity_of(r)).start()
    try:
        assert [r.state for r in converter.wait_ready(10)] == ["ready"]
        yield converter
    finally:
        converter.close()
    stats = pool.stats()
    assert (stats.reads_open, stats.writes_open) == (0, 0)


def put_source(pool: KVPool) -> None:
    assert pool.batch_put([k.text for k in SOURCE_KEYS], PAGES) == [Put.STORED] * 5


def converted(pool: KVPool) -> list[bool]:
    return pool.batch_is_exist([k.converted(BUNDLE).text for k in TARGET_KEYS])


def test_a_source_page_that_is_put_becomes_a_hit_for_the_target(pool: KVPool) -> None:
    with converting(pool, config(rule(SOURCE, TARGET))) as converter:
        put_source(pool)
        assert eventually(lambda: converter.stats().converted_pages == 4)
    hits = [Match(k.converted(BUNDLE).text, True) for k in TARGET_KEYS[1:]]
    assert pool.lookup(TARGET_KEYS, [BUNDLE]) == [None, *hits], "page 0 is never converted"
    assert pool.lookup(TARGET_KEYS) == [None] * 5, "an approximation is never given unasked"
    assert pool.batch_get([h.key for h in hits]) == [bytes(p) for p in PAGES[1:]], "the identity keeps every bit"


def test_a_lookup_that_misses_sets_the_conversion_off(pool: KVPool) -> None:
    with converting(pool, config(rule(SOURCE, TARGET, mode="on_miss"))) as converter:
        put_source(pool)
        assert pool.lookup(TARGET_KEYS[:3], [BUNDLE]) == [None] * 3
        assert eventually(lambda: converter.stats().converted_pages == 2)
        assert converted(pool) == [False, True, True, False, False]


def test_a_hint_sets_the_conversion_off(pool: KVPool) -> None:
    with converting(pool, config(rule(SOURCE, TARGET, mode="hint"))) as converter:
        put_source(pool)
        pool.hint(TARGET_KEYS[2:3])
        assert eventually(lambda: converter.stats().converted_pages == 1)
        assert converted(pool) == [False, False, True, False, False]


def test_a_native_page_of_the_target_wins(pool: KVPool) -> None:
    with converting(pool, config(rule(SOURCE, TARGET))) as converter:
        pool.put(TARGET_KEYS[1].text, PAGES[0])
        put_source(pool)
        assert eventually(lambda: converter.stats().converted_pages == 3)
        assert converter.stats().rejected["NativeExists"] == 1
        assert pool.lookup(TARGET_KEYS[1:2], [BUNDLE]) == [Match(TARGET_KEYS[1].text, False)]
