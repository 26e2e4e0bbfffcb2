"""Where the draft's cache of a prompt comes from; that nothing of it changes an answer, and no fault of it fails one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from moonpool.c2c.config import C2CConfig, Rule
from moonpool.c2c.convert import Conversion
from moonpool.engine.api import CompletionBody, Extension, to_request
from moonpool.engine.instance import Instance
from moonpool.engine.request import GenerateRequest, Usage
from moonpool.errors import BundleCorrupt
from moonpool.store.embedded import EmbeddedPool
from moonpool.system import load_system
from tests.c2c.pairs import BUNDLE, random_kv
from tests.engine.conftest import PAGE, prompt, stored_pages
from tests.engine.drafts import draft_of, identity, perturbed, rule_between

Start = Callable[..., Instance]
PROMPT = prompt(5 * PAGE + 3)
REQUEST = GenerateRequest(prompt=PROMPT, max_tokens=10, ignore_eos=True)
CONVERTIBLE = 3 * PAGE
"""Tokens of the pages between the first and the last full one."""


@pytest.fixture(scope="module")
def near(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(model, tmp_path_factory.mktemp("models") / "near", 0.03)


@pytest.fixture(scope="module")
def rules(model: Path, near: Path) -> C2CConfig:
    return rule_between(model, near)


def drafted(made: Instance, request: GenerateRequest = REQUEST) -> Usage:
    """Of a speculative answer, which is that of plain decoding."""
    plain, fast = made.generate(dataclasses.replace(request, speculate=False)), made.generate(request)
    assert fast.tokens == plain.tokens
    assert fast.usage.drafted > 0 or made.stats().tokens_drafted == 0
    return fast.usage


def test_converted_from_the_large_models_cache(model: Path, near: Path, rules: C2CConfig, start: Start) -> None:
    """No pool is needed: the pages come from the request's own prefill. The draft computes the rest."""
    made = start(model, c2c=rules, load_rule=identity, draft=draft_of(near))
    usage = drafted(made)
    assert (usage.draft_native, usage.draft_converted) == (0, CONVERTIBLE)
    assert usage.accepted > 0, "what an identity makes of the same model's cache is a good one"


def test_computed_where_conversion_is_not_wanted(model: Path, near: Path, rules: C2CConfig, start: Start) -> None:
    made = start(model, c2c=rules, load_rule=identity, draft=draft_of(near, kv="native"))
    usage = drafted(made)
    assert (usage.draft_native, usage.draft_converted) == (0, 0)


def test_its_own_pages_come_first(model: Path, near: Path, rules: C2CConfig, start: Start, pool: EmbeddedPool) -> None:
    small = start(near, pool)
    small.generate(GenerateRequest(prompt=PROMPT, max_tokens=1))
    assert small.flush()
    made = start(model, pool, c2c=rules, load_rule=identity, draft=draft_of(near))
    usage = drafted(made)
    assert (usage.draft_native, usage.draft_converted) == (5 * PAGE, 0)
    assert (usage.native, usage.computed) == (5 * PAGE, 3), "the large model's own, of the plain run"


def test_pages_converted_ahead_come_from_the_pool(
    model: Path, near: Path, rules: C2CConfig, start: Start, pool: EmbeddedPool
) -> None:
    """Pages of noise: poor guesses, the same answer. What the draft computes is stored nowhere."""

    def unused(rule: Rule) -> Conversion:
        raise BundleCorrupt("not this way", key=rule.name)

    made = start(model, pool, c2c=rules, load_rule=unused, draft=draft_of(near))
    keys = rules.models[near.name].spec.identity(PAGE).page_keys(PROMPT)
    pool.batch_put([k.converted(BUNDLE).text for k in keys], random_kv(made.spec.page_shape(PAGE), len(keys)))
    usage = drafted(made)
    assert (usage.draft_native, usage.draft_converted) == (0, CONVERTIBLE)
    assert made.flush()
    assert not any(pool.batch_is_exist([k.text for k in keys]))
    assert stored_pages(pool, made, PROMPT) == [0, 1, 2, 3, 4]


@dataclasses.dataclass
class Faulty:
    """A conversion that raises, or gives what is not finite."""

    value: float | None

    def project_kv(self, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        if self.value is None:
            raise RuntimeError("a fault")
        return torch.full((k.shape[0], k.shape[1], 2, *k.shape[2:]), self.value)


@pytest.mark.parametrize(("value", "guesses"), [(None, False), (float("nan"), True), (1e30, True)])
def test_no_fault_of_a_conversion_fails_a_request(
    model: Path, near: Path, rules: C2CConfig, start: Start, value: float | None, guesses: bool
) -> None:
    made = start(model, c2c=rules, load_rule=lambda _: Faulty(value), draft=draft_of(near))
    usage = drafted(made)
    assert (usage.drafted > 0) is guesses
    assert usage.draft_converted == (CONVERTIBLE if value == 1e30 else 0)


def test_a_bundle_that_cannot_be_loaded_is_no_error(model: Path, near: Path, rules: C2CConfig, start: Start) -> None:
    """Its folder is not there."""
    usage = drafted(start(model, c2c=rules, draft=draft_of(near)))
    assert usage.draft_converted == 0
    assert usage.drafted > 0


def test_a_request_may_opt_out(model: Path, near: Path, start: Start) -> None:
    made = start(model, draft=draft_of(near))
    body = CompletionBody(model="m", prompt="the quick brown fox", max_tokens=8)
    assert to_request(body, made).speculate
    assert not to_request(msgspec.structs.replace(body, moonpool=Extension(speculate=False)), made).speculate
    made.generate(REQUEST)
    before = made.stats().tokens_drafted
    assert before > 0
    made.generate(dataclasses.replace(REQUEST, speculate=False))
    assert made.stats().tokens_drafted == before


def test_a_system_file_names_the_draft(tmp_path: Path) -> None:
    file = tmp_path / "system.yaml"
    models = "c2c: {models: {large: {ref: moon-large}, small: {ref: moon-small}}}"
    file.write_text(f"{models}\ninstances: [{{model: large, draft: {{model: small, kv: native}}}}, small]\n")
    large, small = load_system(file)[0].instances
    assert small == "small"
    assert not isinstance(large, str)
    assert large.draft is not None
    assert (large.draft.model, large.draft.tokens, large.draft.kv) == ("small", 4, "native")
