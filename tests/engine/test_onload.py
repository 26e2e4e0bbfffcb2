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
    with running() as (_, on_load):
        assert on_load.find(TARGET_KEYS, [1, 3], ALLOWED).keys() == {1, 3}
        assert on_load.find(TARGET_KEYS, [1, 3], ()) == {}
        assert on_load.find(salted, [1, 3], ALLOWED) == {}, "a salted prefix is nobody else's"
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

TOKENS = 200
SMALL = "moon-small"


def c2c(**changes: object) -> C2CConfig:
    _, config = bundled_system()
    return msgspec.structs.replace(config, rules=[msgspec.structs.replace(r, **changes) for r in config.rules])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_CACHE", str(tmp_path / "cache"))


PROMPT = [5 + i * 7919 % 2000 for i in range(TOKENS)]
INNER = 160
"""Tokens of the prompt's twelve whole pages but the first and the last."""


def serve(config: C2CConfig, allow: bool | None = None, *, times: int = 1) -> tuple[GenerateResult, Instance, System]:
    """The large model prefills, the small one answers the same prompt; the system is closed again."""
    with no_leaks(), System(config, capacity=64 << 20) as system:
        large, small = system.instances["moon-large"], system.instances[SMALL]
        assert small.wait_ready(30)
        large.generate(GenerateRequest(prompt=PROMPT, max_tokens=1))
        assert large.flush()
        system.pool.converter.wait_ready(30)
        for _ in range(times):
            result = small.generate(
                GenerateRequest(prompt=PROMPT, max_tokens=4, ignore_eos=True, prompt_logits=1, allow_converted=allow)
            )
        return result, small, system


def test_the_target_converts_the_sources_pages_itself() -> None:
    result, small, system = serve(c2c(mode="on_load"))
    assert (result.usage.native, result.usage.converted, result.usage.computed) == (0, INNER, TOKENS - INNER)
    assert system.pool.converter.stats().converted_pages == 0, "nothing is made ahead"
    assert (small.stats().on_load_pages, small.stats().on_load_failed) == (INNER // 16, 0)
    native, _, _ = serve(c2c(mode="on_load"), allow=False)
    assert native.usage.converted == 0, "a request's own wish beats the rule"
    assert result.prompt_logits is not None
    assert native.prompt_logits is not None
    assert not torch.equal(result.prompt_logits, native.prompt_logits), "approximate pages were really used"


def test_what_is_stored_back_gives_the_same_answer_from_the_pool() -> None:
    first, _, _ = serve(c2c(mode="on_load"))
    again, small, _ = serve(c2c(mode="on_load", store_loaded=True), times=2)
    assert again.usage.converted == INNER
    assert small.stats().on_load_pages == INNER // 16, "the second request read what the first one stored"
    assert first.tokens == again.tokens
    assert first.prompt_logits is not None
    assert again.prompt_logits is not None
    assert torch.equal(first.prompt_logits, again.prompt_logits)


def test_a_broken_bundle_means_native_prefill(tmp_path: Path) -> None:
    result, small, _ = serve(c2c(mode="on_load", bundle=str(tmp_path / "none")))
    assert (result.usage.converted, result.usage.computed) == (0, TOKENS)
    assert small.stats().failed == 0


def calibrate(config: C2CConfig, *, fetch: float, convert: float = 1e-7, overhead: float = 0.0) -> None:
    """A machine that prefills a token in about 1.2 ms."""
    pair = config.rules[0].source.spec, config.rules[0].target.spec
    found = Calibration(
        source="moon-large",
        target=SMALL,
        device="cpu",
        threads=1,
        prefill=4e9,
        gemm=1e12,
        fetch={"memory": fetch},
        overhead_s=overhead,
        convert_s={config.rules[0].digest: convert},
    )
    save_calibration(found, *pair)


@contextmanager
def large_only(config: C2CConfig) -> Iterator[System]:
    with no_leaks(), System(config, capacity=64 << 20, serve=["moon-large"]) as system:
        yield system


def answer(system: System, config: C2CConfig, prompt: list[int]) -> tuple[GenerateResult, EngineStats]:
    """A small instance that starts now, so with the calibration that there is now, and answers one request."""
    target = config.models[SMALL]
    with Instance(
        target.ref, target.spec, system.pool, c2c=config, compute="float32",
        origins=lambda asked: config.origins(target.owner, asked),
    ) as small:  # fmt: skip
        assert small.wait_ready(30)
        result = small.generate(GenerateRequest(prompt=prompt, max_tokens=1, ignore_eos=True))
        assert small.flush()
        return result, small.stats()


def prefill(system: System, prompt: list[int]) -> list[int]:
    system.instances["moon-large"].generate(GenerateRequest(prompt=prompt, max_tokens=1))
    assert system.instances["moon-large"].flush()
    return prompt


def test_a_calibrated_engine_takes_what_pays_and_says_why_not() -> None:
    config = c2c(mode="on_load")
    with large_only(config) as system:
        calibrate(config, fetch=1e9)
        result, stats = answer(system, config, prefill(system, PROMPT))
        assert (result.usage.converted, result.usage.declined, stats.prefixes_paid) == (INNER, 0, 1)

        always = c2c(mode="on_load", pays="always")
        calibrate(config, fetch=1e9, convert=1.0)
        other = prefill(system, PROMPT[::-1])
        result, stats = answer(system, always, other)
        assert (result.usage.converted, stats.prefixes_paid) == (INNER, 0), "the rule overrides the model"
        third = prefill(system, PROMPT[100:] + PROMPT[:100])
        result, stats = answer(system, config, third)
        assert (result.usage.converted, result.usage.computed, result.usage.declined) == (0, TOKENS, INNER)
        assert (stats.prefixes_too_slow, stats.prefixes_paid, stats.tokens_declined) == (1, 0, INNER)


def test_pages_too_dear_to_convert_now_leave_those_made_ahead() -> None:
    config = c2c(mode="on_load", store_loaded=True)
    with large_only(config) as system:
        prefill(system, PROMPT)
        result, _ = answer(system, config, PROMPT[:120])
        assert result.usage.converted == 80
        calibrate(config, fetch=1e9, convert=1.0)
        result, stats = answer(system, config, PROMPT)
        assert (result.usage.converted, result.usage.declined) == (80, INNER - 80)
        assert stats.prefixes_paid == 1
