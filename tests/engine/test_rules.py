"""Rules in the engine: whose pages are taken, what is counted and marked, and shadow checks that end in a disabled rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from moonpool.c2c.config import C2CConfig, Model, Rule
from moonpool.c2c.convert import Conversion
from moonpool.c2c.converter import Converter
from moonpool.c2c.gate import Verdict
from moonpool.c2c.projectors.identity import IdentityParameters, IdentityProjector
from moonpool.c2c.shadow import MIN_CHECKS
from moonpool.c2c.signature import load_spec
from moonpool.engine.instance import Instance
from moonpool.engine.metrics import EngineMetrics
from moonpool.engine.replies import extension_json
from moonpool.engine.request import GenerateRequest, GenerateResult
from moonpool.engine.shadow import divergence
from moonpool.errors import BundleCorrupt
from moonpool.store.embedded import EmbeddedPool
from moonpool.testing.fake_clock import FakeClock
from moonpool.testing.leaks import eventually
from tests.engine.conftest import PAGE, prompt
from tests.engine.models import build

TOKENS, DIGEST = 5 * PAGE + 3, "d" * 32
INNER = 4 * PAGE
"""Pages 1 to 3 of five are taken converted; the last of them is computed, and page 0 is."""
PASSED, FORCED = Verdict(True, [], 0.02), Verdict(False, ["top1: needed >= 0.9, is 0.5"], 0.02)
Start = Callable[..., Instance]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape with other weights: each other's pages are nonsense to them."""
    root = tmp_path_factory.mktemp("pair")
    return build(root / "large", "qwen3", seed=1), build(root / "small", "qwen3", seed=2)


def model_of(folder: Path) -> Model:
    spec = load_spec(folder)
    return Model(folder.name, str(folder), spec, spec.identity(PAGE).digest())


def config(pair: tuple[Path, Path], **changes: Any) -> C2CConfig:
    source, target = map(model_of, pair)
    rule = replace(Rule(source, target, "-", DIGEST, "on_put", "always", 30.0), **changes)
    return C2CConfig(models={m.name: m for m in (source, target)}, rules=[rule], page_size=PAGE)


def conversion(rule: Rule, verdict: Verdict = PASSED) -> Conversion:
    shape = rule.source.spec.page_shape(PAGE)
    projector = IdentityProjector(IdentityParameters(layers=shape.layers, width=shape.width))
    return Conversion(projector, rule.source.spec, rule.target.spec, PAGE, verdict=verdict)


def stock(pool: EmbeddedPool, conf: C2CConfig, prompts: list[list[int]]) -> None:
    """Put converted pages of each prompt: random ones, as bad as can be."""
    torch.manual_seed(0)
    target = conf.rules[0].target
    shape = target.spec.page_shape(PAGE)
    for tokens in prompts:
        keys = target.spec.identity(PAGE).page_keys(tokens)
        pages = [torch.randn(shape.nbytes // 2).bfloat16() for _ in keys]
        pool.batch_put([k.converted(DIGEST).text for k in keys], pages)


@contextmanager
def converting(pool: EmbeddedPool, conf: C2CConfig, verdict: Verdict | None = PASSED) -> Iterator[Converter]:
    """A converter that has judged the rule; without a verdict, refused it."""

    def load(rule: Rule, _: object) -> Conversion:
        if verdict is None:
            raise BundleCorrupt("refused")
        return conversion(rule, verdict)

    converter = Converter(pool, conf, load=load).start()
    try:
        converter.wait_ready(10)
        assert eventually(lambda: bool(pool.master.rules().rules)), "the master knows what the converter made of it"
        yield converter
    finally:
        converter.close()


def ask(instance: Instance, tokens: list[int]) -> GenerateResult:
    return instance.generate(GenerateRequest(prompt=tokens, max_tokens=1, ignore_eos=True))


def small(start: Start, pair: tuple[Path, Path], pool: EmbeddedPool, conf: C2CConfig, **options: Any) -> Instance:
    owner = conf.rules[0].target.owner
    return start(pair[1], pool, c2c=conf, origins=lambda wish: conf.origins(owner, wish), **options)


def test_pages_are_taken_of_a_rule_that_passed_and_are_named(
    pair: tuple[Path, Path], pool: EmbeddedPool, start: Start
) -> None:
    conf = config(pair)
    stock(pool, conf, [prompt(TOKENS)])
    with converting(pool, conf):
        instance = small(start, pair, pool, conf)
        result = ask(instance, prompt(TOKENS))
    assert result.usage.converted == INNER - PAGE
    assert extension_json(result)["bundles"] == [{"digest": DIGEST, "forced": False}]
    assert [(r.requests, r.checks) for r in instance.rules()] == [(1, 0)]


def test_answers_of_a_forced_rule_are_marked(pair: tuple[Path, Path], pool: EmbeddedPool, start: Start) -> None:
    conf = config(pair)
    stock(pool, conf, [prompt(TOKENS)])
    with converting(pool, conf, FORCED):
        instance = small(start, pair, pool, conf)
        result = ask(instance, prompt(TOKENS))
    assert extension_json(result)["bundles"] == [{"digest": DIGEST, "forced": True}]
    samples = _samples(instance)
    labels = (("forced", "true"), ("model", "small"), ("rule", "large→small"))
    assert samples["moonpool_engine_rule_requests_total", labels] == 1


@pytest.mark.parametrize("who", ["refused", "nobody", "disabled"])
def test_no_page_is_taken_of_a_rule_that_is_not_served(
    who: str, pair: tuple[Path, Path], pool: EmbeddedPool, start: Start
) -> None:
    conf = config(pair)
    stock(pool, conf, [prompt(TOKENS)])
    if who == "nobody":
        usage = ask(small(start, pair, pool, conf), prompt(TOKENS)).usage
    else:
        with converting(pool, conf, None if who == "refused" else PASSED):
            if who == "disabled":
                pool.disable_rule(DIGEST, "by hand")
            usage = ask(small(start, pair, pool, conf), prompt(TOKENS)).usage
    assert (usage.converted, usage.computed) == (0, TOKENS)


@pytest.mark.parametrize("served", [True, False])
def test_a_rule_that_the_engine_loads_itself_needs_no_other_word(
    served: bool, pair: tuple[Path, Path], pool: EmbeddedPool, start: Start
) -> None:
    def load(rule: Rule) -> Conversion:
        if not served:
            raise BundleCorrupt("refused")
        return conversion(rule)

    conf = config(pair, mode="on_load")
    stock(pool, conf, [prompt(TOKENS)])
    instance = small(start, pair, pool, conf, load_rule=load)
    assert instance.wait_ready(10)
    assert (ask(instance, prompt(TOKENS)).usage.converted > 0) == served


def test_shadow_checks_find_nonsense_and_the_rule_is_disabled_everywhere(
    pair: tuple[Path, Path], pool: EmbeddedPool, start: Start
) -> None:
    conf, clock = config(pair, shadow=1.0), FakeClock()
    prompts = [prompt(TOKENS, seed) for seed in range(MIN_CHECKS + 2)]
    stock(pool, conf, prompts)
    with converting(pool, conf) as converter:
        instance = small(start, pair, pool, conf, clock=clock)
        for done, tokens in enumerate(prompts[:MIN_CHECKS]):
            assert ask(instance, tokens).usage.converted == INNER - PAGE
            assert eventually(lambda done=done: instance.rules()[0].checks == done + 1)  # type: ignore[misc]
        assert "drift" in instance.disabled_rules()[DIGEST]
        assert ask(instance, prompts[-2]).usage.converted == 0, "at once"
        (known,) = pool.master.rules().rules
        assert (known.state, known.checks, known.gate) == ("disabled", MIN_CHECKS, "passed")
        assert known.kl / known.checks > 0.2
        assert eventually(lambda: converter.stats().rules[0].state == "disabled")
        samples = _samples(instance)
        labels = (("model", "small"), ("rule", "large→small"))
        assert samples["moonpool_engine_rule_disabled", labels] == 1
        assert samples["moonpool_engine_shadow_checks_total", labels] == MIN_CHECKS
        assert samples["moonpool_engine_shadow_kl_count", (("model", "small"),)] == MIN_CHECKS
        pool.enable_rule(DIGEST)
        clock.advance(3.0)
        assert ask(instance, prompts[-1]).usage.converted == INNER - PAGE, "somebody answers for it"


def test_a_check_computes_natively_and_touches_no_page(
    pair: tuple[Path, Path], pool: EmbeddedPool, start: Start
) -> None:
    """Over its own pages the target agrees with itself: what is compared is the same prompt, computed anew."""
    conf = config(pair, shadow=1.0)
    tokens = prompt(TOKENS)
    native = start(pair[1], pool)
    ask(native, tokens)
    assert native.flush()
    keys = native.spec.identity(PAGE).page_keys(tokens)
    pages = [pool.get(k.text) for k in keys]
    pool.batch_remove([k.text for k in keys])  # first: a converted page loses to a native one
    pool.batch_put([k.converted(DIGEST).text for k in keys], pages)
    with converting(pool, conf):
        instance = small(start, pair, pool, conf)
        assert ask(instance, tokens).usage.converted == INNER - PAGE
        assert instance.flush()
        there, before = list(pool.keys()), pool.stats()
        assert eventually(lambda: instance.rules()[0].checks == 1)
        assert instance.rules()[0].kl == pytest.approx(0.0, abs=1e-3)
        assert instance.rules()[0].agreed == 1
        assert list(pool.keys()) == there
        assert pool.stats().hits - before.hits == 0


def test_divergence_is_kl_of_native_and_other() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.7, 0.1])
    kl, same = divergence(p.log(), q.log() + 3.0)
    assert kl == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-6)
    assert not same
    none, alike = divergence(p.log(), p.log())
    assert none == pytest.approx(0.0, abs=1e-9)
    assert alike


def _samples(instance: Instance) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = EngineMetrics({"small": instance}).text().decode()
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}
