"""Fuse mode in the engine: the fused cache is the published formula's, nothing fused is stored, and no fault fails a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moonpool.c2c.bundle import write_bundle
from moonpool.c2c.config import C2CConfig, C2CFile, ModelEntry, RuleEntry, check, resolve
from moonpool.c2c.converter import Converter
from moonpool.c2c.pages import pack, unpack
from moonpool.c2c.projectors.fuse import HALVES, NATIVE, FuseParameters, Fuser
from moonpool.c2c.projectors.identity import IdentityParameters, IdentityProjector
from moonpool.c2c.signature import load_spec
from moonpool.engine.instance import Instance
from moonpool.engine.model import Runner
from moonpool.engine.request import GenerateRequest
from moonpool.errors import ConfigError
from moonpool.store.embedded import EmbeddedPool
from tests.c2c.test_fuse import random_weights, reference
from tests.engine.conftest import PAGE, prompt, stored_pages
from tests.engine.models import build

Start = Callable[..., Instance]

SHAPE = FuseParameters(
    source_layers=3,
    source_heads=2,
    source_head_dim=16,
    target_layers=3,
    target_heads=2,
    target_head_dim=16,
    hidden=32,
    intermediate=48,
    blocks=1,
    sources=[NATIVE, 0, 2],
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one tokenizer, a fuser and a projector between them."""
    root = tmp_path_factory.mktemp("fuse")
    specs = [load_spec(build(root / name, name, seed)) for seed, name in enumerate(("llama", "qwen3"))]
    write_bundle(root / "fuser", Fuser(SHAPE, random_weights(SHAPE)), *specs, dtype=torch.float32)
    write_bundle(root / "projector", IdentityProjector(IdentityParameters(layers=3, width=32)), *specs)
    return root


def config(place: Path, bundle: str = "fuser", **changes: Any) -> C2CConfig:
    rule = RuleEntry(source="llama", target="qwen3", bundle=bundle, **{"mode": "fuse", **changes})
    file = C2CFile(models={n: ModelEntry(n) for n in ("llama", "qwen3")}, rules=[rule], page_size=PAGE)
    check(file)
    return resolve(file, [place])


@pytest.fixture
def pair(place: Path, pool: EmbeddedPool, start: Start) -> Callable[..., tuple[Instance, Instance]]:
    """(source, target), the target with its rule loaded."""

    def begin(bundle: str = "fuser", **changes: Any) -> tuple[Instance, Instance]:
        target = start(place / "qwen3", pool, c2c=config(place, bundle, **changes))
        assert target.wait_ready(20)
        return start(place / "llama", pool), target

    return begin


def request(tokens: list[int], **changes: Any) -> GenerateRequest:
    return dataclasses.replace(
        GenerateRequest(prompt=tokens, max_tokens=PAGE + 4, ignore_eos=True, prompt_logits=1), **changes
    )


def prefill(instance: Instance, tokens: list[int]) -> None:
    instance.generate(request(tokens, max_tokens=0, prompt_logits=0))
    assert instance.flush()


def page(pool: EmbeddedPool, instance: Instance, tokens: list[int], index: int) -> bytes:
    return pool.get(instance.spec.identity(PAGE).page_keys(tokens)[index].text)


@pytest.mark.parametrize("n", [4 * PAGE, 3 * PAGE + 5, PAGE + 1])
def test_the_last_token_sees_the_published_formulas_cache(
    place: Path, pool: EmbeddedPool, pair: Callable[..., tuple[Instance, Instance]], n: int
) -> None:
    source, target = pair()
    tokens, fused = prompt(n), min(n // PAGE * PAGE, n - 1)
    prefill(source, tokens)
    result = target.generate(request(tokens))
    assert result.usage.fused == fused
    assert (target.stats().requests_fused, target.stats().tokens_fused) == (1, fused)

    runner, weights = (
        Runner(str(place / "qwen3"), target.spec, page_size=PAGE, compute="float32"),
        random_weights(SHAPE),
    )
    kv = runner.new_sequence(n)
    runner.forward([kv], [tokens[:-1]], keep=0)
    pages = [unpack(page(pool, source, tokens, i), source.spec.page_shape(PAGE)) for i in range(n // PAGE)]
    theirs = [torch.cat(half)[:fused] for half in zip(*pages, strict=True)]
    for layer, read in enumerate(SHAPE.sources):
        for half, cache in enumerate((kv.keys, kv.values)):
            if read != NATIVE:
                own, their = cache[layer, :, :fused], theirs[half][:, read].transpose(0, 1)
                made = reference(weights[layer], HALVES[half], their, own, 2, SHAPE.blocks)
                cache[layer, :, :fused] = made.bfloat16().float()
    want = runner.forward([kv], [tokens[-1:]], keep=1)[0]
    assert result.prompt_logits is not None
    torch.testing.assert_close(result.prompt_logits, want, atol=2e-2, rtol=0)
    plain = target.generate(request(tokens, allow_converted=False))
    assert plain.prompt_logits is not None
    assert (plain.prompt_logits - want).abs().max() > 0.5, "a fuser that changes nothing proves nothing"


def test_only_native_pages_are_stored(
    place: Path, pool: EmbeddedPool, pair: Callable[..., tuple[Instance, Instance]], start: Start
) -> None:
    source, target = pair()
    tokens = prompt(3 * PAGE)
    prefill(source, tokens)
    result = target.generate(request(tokens))
    assert target.flush()
    assert stored_pages(pool, target, [*tokens, *result.tokens]) == [0, 1], "what stands before the fused last token"
    with EmbeddedPool(8 << 20) as other:
        alone = start(place / "qwen3", other)
        prefill(alone, tokens)
        for i in (0, 1):
            assert page(pool, target, tokens, i) == page(other, alone, tokens, i)
        alone.close()
    again = target.generate(request(tokens))  # the target's own pages come from the pool now
    assert (again.usage.native, again.usage.fused) == (2 * PAGE, 3 * PAGE - 1)
    assert again.tokens == result.tokens


def test_missing_source_pages_leave_the_request_as_it_is(
    place: Path, pool: EmbeddedPool, pair: Callable[..., tuple[Instance, Instance]], start: Start
) -> None:
    source, target = pair()
    tokens = prompt(4 * PAGE)
    prefill(source, tokens)
    pool.remove(source.spec.identity(PAGE).page_keys(tokens)[2].text)
    result = target.generate(request(tokens))
    assert result.usage.fused == 0
    assert result.tokens == start(place / "qwen3").generate(request(tokens)).tokens
    assert target.generate(request(prompt(PAGE - 1))).usage.fused == 0, "no full page"
    stats = target.stats()
    assert (stats.requests_fused, stats.requests_unfused) == (0, 2)
    assert target.flush()
    assert stored_pages(pool, target, [*tokens, *result.tokens]) == [0, 1, 2, 3, 4]


def test_the_request_and_the_rule_decide(pair: Callable[..., tuple[Instance, Instance]]) -> None:
    source, target = pair(serve="on_request")
    tokens = prompt(2 * PAGE)
    prefill(source, tokens)
    assert [target.generate(request(tokens, allow_converted=wish)).usage.fused for wish in (None, False, True)] == [
        0, 0, 2 * PAGE - 1,
    ]  # fmt: skip
    assert target.stats().requests_unfused == 0, "who does not want it, does not miss it"


def test_a_source_page_with_nan_fuses_nothing(
    pool: EmbeddedPool, pair: Callable[..., tuple[Instance, Instance]]
) -> None:
    source, target = pair()
    tokens = prompt(2 * PAGE)
    shape = source.spec.page_shape(PAGE)
    k = torch.full((PAGE, shape.layers, shape.heads, shape.dim), torch.nan)
    for key in source.spec.identity(PAGE).page_keys(tokens):
        pool.put(key.text, bytes(pack(k, k)))
    result = target.generate(request(tokens))
    assert (result.usage.fused, target.stats().requests_unfused) == (0, 1)
    assert len(result.tokens) == PAGE + 4


def test_a_projector_is_refused_in_fuse_mode_and_the_target_serves_on(
    pair: Callable[..., tuple[Instance, Instance]],
) -> None:
    source, target = pair("projector")
    assert "nothing to add to a cache that the target has made" in target.refusals()["llama→qwen3"]
    assert source.refusals() == {}
    tokens = prompt(2 * PAGE)
    prefill(source, tokens)
    assert target.generate(request(tokens)).usage.fused == 0
    assert target.stats().requests_unfused == 1


def test_a_fuser_is_refused_in_every_other_mode(place: Path, pool: EmbeddedPool) -> None:
    converter = Converter(pool, config(place, mode="on_put")).start()
    try:
        (status,) = converter.wait_ready(20)
    finally:
        converter.close()
    assert status.state == "refused"
    assert "half of its first matrix multiplies the target's own cache" in status.reason
    assert "below chance" in status.reason


def test_fuse_rules_convert_nothing(place: Path) -> None:
    found = config(place)
    assert found.rules == []
    assert found.origins(found.models["qwen3"].owner, True) == ()
    assert C2CConfig.decode(found.encode()).fusions == found.fusions


def test_one_source_for_each_target() -> None:
    rules = [RuleEntry(source=s, target="c", bundle="x", mode="fuse") for s in ("a", "b")]
    file = C2CFile(models={n: ModelEntry(n) for n in "abc"}, rules=rules)
    with pytest.raises(ConfigError, match="second source fused into c"):
        check(file)
