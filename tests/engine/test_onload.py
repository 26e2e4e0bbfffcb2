"""Convert on load: what it takes, what it refuses, and that nothing that goes wrong fails a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from moonpool.c2c.calibration import Calibration, save_calibration
from moonpool.c2c.config import C2CConfig, Rule
from moonpool.c2c.convert import Conversion
from moonpool.c2c.pages import unpack
from moonpool.c2c.projectors.identity import IdentityParameters, IdentityProjector
from moonpool.engine.instance import Instance
from moonpool.engine.onload import OnLoad
from moonpool.engine.request import GenerateRequest, GenerateResult
from moonpool.engine.stats import EngineStats
from moonpool.errors import BundleCorrupt, NoSpace
from moonpool.keys import PageKey
from moonpool.store.embedded import EmbeddedPool
from moonpool.system import System, bundled_system
from moonpool.testing.fake_clock import FakeClock
from moonpool.testing.leaks import no_leaks
from tests.c2c.pairs import BUNDLE, PAGE, identity_of, keys_of, model, random_kv, rule

SOURCE, TARGET = model("source"), model("target")
SHAPE = SOURCE.spec.page_shape(PAGE)
PAGES = random_kv(SHAPE, 6)
SOURCE_KEYS, TARGET_KEYS = keys_of(SOURCE, 6 * PAGE), keys_of(TARGET, 6 * PAGE)
RULE = rule(SOURCE, TARGET, mode="on_load")
ALLOWED = (BUNDLE,)


@contextmanager
def running(
    *rules: Rule, load: Callable[[Rule], Conversion] = identity_of, clock: FakeClock | None = None, batch: int = 64
) -> Iterator[tuple[EmbeddedPool, OnLoad]]:
    with no_leaks(), EmbeddedPool(8 << 20) as pool:
        pool.batch_put([k.text for k in SOURCE_KEYS], PAGES)
        on_load = OnLoad(pool, rules or [RULE], load, clock or FakeClock(), batch_pages=batch).start()
        try:
            assert on_load.wait_ready(10)
            yield pool, on_load
        finally:
            on_load.close(10)
            assert pool.stats().reads_open == pool.stats().writes_open == 0


Written = dict[int, tuple[Tensor, Tensor]]


START = FakeClock().now()


def read(on_load: OnLoad, indices: list[int]) -> Written:
    written: Written = {}
    found = on_load.find(TARGET_KEYS, indices, ALLOWED)
    done = on_load.read(found, START, lambda i, k, v: written.update({i: (k.clone(), v.clone())}))
    assert done == written.keys()
    return written


def test_the_pages_are_those_that_the_conversion_makes() -> None:
    with running(batch=2) as (_, on_load):
        written = read(on_load, [1, 2, 3, 4, 5])
        assert on_load.counts["converted"] == 5
    for i, (k, v) in written.items():
        want_k, want_v = unpack(bytes(PAGES[i]), SHAPE)
        assert torch.equal(k, want_k)
        assert torch.equal(v, want_v)


def test_only_what_is_missing_allowed_and_the_rules_own() -> None:
    salted = TARGET.spec.identity(PAGE, salt="s").page_keys(range(6 * PAGE))
    foreign = [k.of("f" * 32) for k in TARGET_KEYS]
    with running() as (_, on_load):
        assert on_load.find(TARGET_KEYS, [1, 3], ALLOWED).keys() == {1, 3}
        assert on_load.find(TARGET_KEYS, [1, 3], ()) == {}
        assert on_load.find(salted, [1, 3], ALLOWED) == {}, "a salted prefix is nobody else's"
        assert on_load.find(foreign, [1, 3], ALLOWED) == {}, "another identity's page, of the same tokens"
    with running(rule(SOURCE, TARGET, mode="on_put")) as (_, on_load):
        assert on_load.find(TARGET_KEYS, [1, 3], ALLOWED) == {}, "another mode is the converter's"


def test_a_refused_bundle_serves_nothing() -> None:
    def broken(_: Rule) -> Conversion:
        raise BundleCorrupt("no bundle here")

    def faulty(_: Rule) -> Conversion:
        raise RuntimeError("unforeseen")

    for load, says in ((broken, "no bundle here"), (faulty, "unforeseen")):
        with running(load=load) as (_, on_load):
            assert on_load.find(TARGET_KEYS, [1], ALLOWED) == {}
            assert says in on_load.refusals[RULE.name]


def test_a_page_that_is_gone_or_damaged_is_a_miss() -> None:
    with running() as (pool, on_load):
        found = on_load.find(TARGET_KEYS, [1, 2, 3], ALLOWED)
        nan = bytearray(PAGES[3])
        nan[0:2] = b"\xc0\x7f"
        pool.batch_remove([SOURCE_KEYS[2].text, SOURCE_KEYS[3].text])
        pool.batch_put([SOURCE_KEYS[3].text], [nan])
        assert on_load.read(found, START, lambda *_: None) == {1}
        assert dict(on_load.counts) == {"converted": 1, "source_missing": 1, "ConversionRefused": 1}


def test_behind_a_failed_batch_nothing_is_converted() -> None:
    with running(batch=2) as (pool, on_load):
        found = on_load.find(TARGET_KEYS, [1, 2, 3, 4, 5], ALLOWED)
        pool.batch_remove([SOURCE_KEYS[2].text])
        assert on_load.read(found, START, lambda *_: None) == {1}


def test_a_batch_does_not_begin_after_the_deadline() -> None:
    clock = FakeClock()

    def slow(index: int, _k: Tensor, _v: Tensor) -> None:
        clock.advance(20.0)

    with running(clock=clock, batch=1) as (_, on_load):
        found = on_load.find(TARGET_KEYS, [1, 2, 3, 4, 5], ALLOWED)
        assert on_load.read(found, START, slow) == {1, 2}, "30 s pass within the second page"
        assert on_load.counts["late"] == 3


def test_a_projectors_fault_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(IdentityProjector):
        def project(self, x: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

    def load(_: Rule) -> Conversion:
        parameters = IdentityParameters(layers=SHAPE.layers, width=SHAPE.width)
        return Conversion(Faulty(parameters), SOURCE.spec, TARGET.spec, PAGE)

    caplog.set_level(
        "CRITICAL", "moonpool.engine.onload"
    )  # a record that pytest keeps has the traceback, and so the views
    with running(load=load) as (_, on_load):
        assert read(on_load, [1, 2]) == {}
        assert on_load.counts["internal"] == 2


def test_stored_back_they_serve_the_next_lookup() -> None:
    with running(msgspec.structs.replace(RULE, store_loaded=True)) as (pool, on_load):
        read(on_load, [1, 2])
        matches = pool.lookup(TARGET_KEYS[1:4], ALLOWED)
        assert [m.converted if m else None for m in matches] == [True, True, None]
    with running() as (pool, on_load):
        read(on_load, [1, 2])
        assert pool.lookup(TARGET_KEYS[1:4], ALLOWED) == [None] * 3, "by default nothing is written"


def test_a_full_pool_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(msgspec.structs.replace(RULE, store_loaded=True)) as (pool, on_load):
        monkeypatch.setattr(pool, "batch_put", lambda keys, values: [NoSpace("full") for _ in keys])
        assert read(on_load, [1, 2]).keys() == {1, 2}
        assert on_load.counts["not_stored"] == 2


# -- the bundled pair, end to end

TOKENS, SMALL, LARGE = 200, "moon-small", "moon-large"
PROMPT = [5 + i * 7919 % 2000 for i in range(TOKENS)]
OTHERS = [PROMPT[::-1], PROMPT[100:] + PROMPT[:100]]
INNER = 160
"""Tokens of a prompt's twelve whole pages but the first and the last."""


def c2c(**changes: object) -> C2CConfig:
    _, config = bundled_system()
    return msgspec.structs.replace(config, rules=[msgspec.structs.replace(r, **changes) for r in config.rules])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def prefilled() -> dict[str, bytes]:
    """The large model's pages of all prompts."""
    large = c2c().models[LARGE]
    with EmbeddedPool(64 << 20) as pool, Instance(large.ref, large.spec, pool, compute="float32") as instance:
        for prompt in (PROMPT, *OTHERS):
            instance.generate(GenerateRequest(prompt=prompt, max_tokens=0))
        assert instance.flush()
        keys = list(pool.keys())
        return {k: page for k, page in zip(keys, pool.batch_get(keys), strict=True) if page is not None}


@contextmanager
def pool_of(pages: dict[str, bytes]) -> Iterator[EmbeddedPool]:
    with no_leaks(), EmbeddedPool(64 << 20) as pool:
        pool.batch_put(list(pages), list(pages.values()))
        yield pool


def answer(
    pool: EmbeddedPool, config: C2CConfig, prompt: list[int] = PROMPT, allow: bool | None = None
) -> tuple[GenerateResult, EngineStats]:
    """A small instance that starts now, so with the calibration that there is now, answers one request and ends."""
    target = config.models[SMALL]
    with Instance(
        target.ref, target.spec, pool, c2c=config, compute="float32",
        origins=lambda asked: config.origins(target.owner, asked),
    ) as small:  # fmt: skip
        assert small.wait_ready(30)
        result = small.generate(
            GenerateRequest(prompt=prompt, max_tokens=4, ignore_eos=True, prompt_logits=1, allow_converted=allow)
        )
        assert small.flush()
        return result, small.stats()


def logits(result: GenerateResult) -> Tensor:
    assert result.prompt_logits is not None
    return result.prompt_logits


def test_a_system_converts_on_load_and_nothing_ahead() -> None:
    with no_leaks(), System(c2c(mode="on_load"), capacity=64 << 20) as system:
        large, small = system.instances[LARGE], system.instances[SMALL]
        assert small.wait_ready(30)
        system.pool.converter.wait_ready(30)
        large.generate(GenerateRequest(prompt=PROMPT, max_tokens=0))
        assert large.flush()
        result = small.generate(GenerateRequest(prompt=PROMPT, max_tokens=4, ignore_eos=True))
        assert small.flush()
        assert (result.usage.native, result.usage.converted, result.usage.computed) == (0, INNER, TOKENS - INNER)
        assert system.pool.converter.stats().converted_pages == 0
        stats = small.stats()
    assert (stats.on_load_pages, stats.on_load_failed) == (INNER // 16, 0)
    assert stats.pages_stored == 1, "page 0; what was computed behind converted pages is not native"


def test_a_requests_own_wish_beats_the_rule(prefilled: dict[str, bytes]) -> None:
    with pool_of(prefilled) as pool:
        converted, _ = answer(pool, c2c(mode="on_load"))
        native, stats = answer(pool, c2c(mode="on_load"), allow=False)
    assert (converted.usage.converted, native.usage.converted, stats.on_load_pages) == (INNER, 0, 0)
    assert not torch.equal(logits(converted), logits(native)), "approximate pages were really used"


def test_what_is_stored_back_gives_the_same_answer_from_the_pool(prefilled: dict[str, bytes]) -> None:
    config = c2c(mode="on_load", store_loaded=True)
    with pool_of(prefilled) as pool:
        first, made = answer(pool, config)
        pool.batch_remove([k.text for k in _keys(config, SMALL)[:1]])  # as the first found it: without page 0
        again, read = answer(pool, config)
    assert (made.on_load_pages, read.on_load_pages) == (INNER // 16, 0)
    assert again.usage == first.usage
    assert first.tokens == again.tokens
    assert torch.equal(logits(first), logits(again))


def _keys(config: C2CConfig, name: str) -> list[PageKey]:
    return config.models[name].spec.identity(config.page_size).page_keys(PROMPT)


def test_a_broken_bundle_means_native_prefill(prefilled: dict[str, bytes], tmp_path: Path) -> None:
    with pool_of(prefilled) as pool:
        result, stats = answer(pool, c2c(mode="on_load", bundle=str(tmp_path / "none")))
        native, _ = answer(pool, c2c(mode="on_load"), allow=False)
    assert (result.usage.converted, result.usage.computed, stats.failed) == (0, TOKENS, 0)
    assert result.tokens == native.tokens


def calibrate(config: C2CConfig, *, convert: float = 1e-7) -> None:
    """A machine that prefills a token in about 1.2 ms and reads it in a few µs."""
    pair = config.rules[0].source.spec, config.rules[0].target.spec
    found = Calibration(
        source=LARGE, target=SMALL, device="cpu", threads=1, prefill=4e9, gemm=1e12, fetch={"memory": 1e9},
        overhead_s=0.0, convert_s={config.rules[0].digest: convert},
    )  # fmt: skip
    save_calibration(found, *pair)


def test_a_calibrated_engine_takes_what_pays_and_says_why_not(prefilled: dict[str, bytes]) -> None:
    config = c2c(mode="on_load")
    with pool_of(prefilled) as pool:
        calibrate(config)
        result, stats = answer(pool, config)
        assert (result.usage.converted, result.usage.declined, stats.prefixes_paid) == (INNER, 0, 1)

        calibrate(config, convert=1.0)
        result, stats = answer(pool, c2c(mode="on_load", pays="always"), OTHERS[0])
        assert (result.usage.converted, stats.prefixes_paid) == (INNER, 0), "the rule overrides the model"
        result, stats = answer(pool, config, OTHERS[1])
        assert (result.usage.converted, result.usage.computed, result.usage.declined) == (0, TOKENS, INNER)
        assert (stats.prefixes_too_slow, stats.prefixes_paid, stats.tokens_declined) == (1, 0, INNER)


def test_pages_too_dear_to_convert_now_leave_those_made_ahead(prefilled: dict[str, bytes]) -> None:
    config = c2c(mode="on_load", store_loaded=True)
    with pool_of(prefilled) as pool:
        assert answer(pool, config, PROMPT[:120])[0].usage.converted == 80
        calibrate(config, convert=1.0)
        result, stats = answer(pool, config)
    assert (result.usage.converted, result.usage.declined) == (80, INNER - 80)
    assert stats.prefixes_paid == 1
