"""Aliases in the engine: another model's page is read in place where it is the same, and nowhere else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from moonpool.c2c.config import Alias, C2CConfig, Model
from moonpool.c2c.signature import load_spec
from moonpool.engine.instance import Instance
from moonpool.engine.request import GenerateRequest, GenerateResult
from moonpool.store.embedded import EmbeddedPool
from moonpool.types import Missed
from tests.engine.conftest import PAGE, prompt, stored_pages
from tests.engine.models import build
from tests.engine.test_instance import BUNDLE, put_converted

Start = Callable[..., Instance]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models that differ in the head only."""
    root = tmp_path_factory.mktemp("alias")
    shutil.copytree(build(root / "one", "qwen3", 3), root / "two")
    weights = load_file(root / "one" / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].roll(1, 0)
    save_file(weights, root / "two" / "model.safetensors", {"format": "pt"})
    return root


def config(place: Path, until: list[list[int]]) -> C2CConfig:
    specs = [load_spec(place / name) for name in ("one", "two")]
    one, two = (Model(s.name, str(place / s.name), s, s.identity(PAGE).digest()) for s in specs)
    return C2CConfig(aliases=[Alias(one, two, until)], page_size=PAGE)


@pytest.fixture
def pair(place: Path, pool: EmbeddedPool, start: Start) -> Callable[..., tuple[Instance, Instance]]:
    def begin(*until: list[int], origins: tuple[str, ...] = ()) -> tuple[Instance, Instance]:
        target = start(place / "two", pool, c2c=config(place, list(until)), origins=origins)
        return start(place / "one", pool), target

    return begin


def run(instance: Instance, tokens: list[int]) -> GenerateResult:
    result = instance.generate(GenerateRequest(prompt=tokens, max_tokens=6, ignore_eos=True))
    assert instance.flush()
    return result


def test_the_sources_pages_serve_as_the_targets_own(
    place: Path, pool: EmbeddedPool, pair: Callable[..., tuple[Instance, Instance]], start: Start
) -> None:
    source, target = pair()
    tokens = prompt(5 * PAGE + 3)
    run(source, tokens)
    objects = pool.stats().objects
    result = run(target, tokens)
    assert (result.usage.native, result.usage.shared, result.usage.computed) == (5 * PAGE, 5 * PAGE, 3)
    assert result.usage.converted == 0
    assert result.tokens == run(start(place / "two"), tokens).tokens
    assert pool.stats().objects == objects, "nothing is kept twice"
    assert target.stats().tokens_shared == 5 * PAGE
    assert run(source, tokens).usage.shared == 0


def test_own_pages_come_first_and_what_follows_is_stored(
    pool: EmbeddedPool, pair: Callable[..., tuple[Instance, Instance]]
) -> None:
    source, target = pair()
    tokens = prompt(5 * PAGE + 3)
    run(target, tokens[: 2 * PAGE + 1])
    run(source, tokens[: 4 * PAGE + 1])
    usage = run(target, tokens).usage
    assert (usage.native, usage.shared) == (4 * PAGE, 2 * PAGE)
    assert stored_pages(pool, target, tokens) == [0, 1, 4], "exact, so what is computed behind it is the target's own"


def test_an_adapter_ends_the_alias_at_its_invocation(pair: Callable[..., tuple[Instance, Instance]]) -> None:
    tokens = prompt(5 * PAGE + 3)
    at = 3 * PAGE + 2
    source, target = pair(tokens[at : at + 2])
    run(source, tokens)
    assert run(target, tokens).usage.shared == 3 * PAGE
    other = [*tokens[:at], *prompt(2 * PAGE, seed=5)]
    run(source, other)
    assert run(target, other).usage.shared == len(other) // PAGE * PAGE, "not invoked: the same to the end"


def test_an_exact_page_beats_a_converted_one_and_is_not_announced(
    pool: EmbeddedPool, pair: Callable[..., tuple[Instance, Instance]]
) -> None:
    source, target = pair(origins=(BUNDLE,))
    tokens = prompt(4 * PAGE + 1)
    run(source, tokens[: 2 * PAGE])
    put_converted(pool, target, tokens, [1, 2])
    with closing(pool.subscribe([target.spec.identity(PAGE).digest()], 100)) as events:
        usage = run(target, tokens).usage
        missed = [e.key for e in events.next(100, 1.0) if isinstance(e, Missed)]
    assert (usage.shared, usage.converted) == (2 * PAGE, PAGE)
    assert missed == [target.spec.identity(PAGE).page_keys(tokens)[3].text]
