"""Speculative decoding: whatever the draft guesses and whatever its cache holds, the answer is plain decoding's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonpool import paths
from moonpool.engine.instance import Instance
from moonpool.engine.margin import NOISE
from moonpool.engine.request import GenerateRequest, GenerateResult
from moonpool.engine.sampling import SamplingParams
from moonpool.engine.scheduler import Limits
from moonpool.engine.speculative import Speculation
from moonpool.errors import ConfigError, ConversionRefused
from moonpool.store.embedded import EmbeddedPool
from moonpool.system import bundled_system
from tests.engine.conftest import PAGE, prompt
from tests.engine.drafts import draft_of, perturbed
from tests.engine.models import build

MODELS = paths.repo_dir("models")
assert MODELS is not None
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
SAMPLINGS = [SamplingParams(), SEEDED, SamplingParams(temperature=1.3, seed=5)]
Start = Callable[..., Instance]


@pytest.fixture(scope="module")
def near(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(model, tmp_path_factory.mktemp("models") / "near", 0.1)


def both(instance: Instance, request: GenerateRequest) -> tuple[GenerateResult, GenerateResult]:
    """(plain, speculative)"""
    return instance.generate(dataclasses.replace(request, speculate=False)), instance.generate(request)


def same(plain: GenerateResult, fast: GenerateResult) -> bool:
    return (fast.tokens, fast.text, fast.finish_reason) == (plain.tokens, plain.text, plain.finish_reason)


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_many_answers_are_plain_decodings(
    any_model: Path, start: Start, tmp_path: Path, sampling: SamplingParams
) -> None:
    made = start(any_model, draft=draft_of(perturbed(any_model, tmp_path / "near", 0.03)))
    drafted = accepted = 0
    for seed in range(6):
        request = GenerateRequest(prompt=prompt(5 + 9 * seed, seed), max_tokens=16, sampling=sampling, ignore_eos=True)
        plain, fast = both(made, request)
        assert same(plain, fast)
        assert (plain.usage.drafted, plain.usage.accepted, plain.usage.replayed) == (0, 0, 0)
        drafted, accepted = drafted + fast.usage.drafted, accepted + fast.usage.accepted
    assert 0 < accepted < drafted, "guesses of both kinds, or this proves little"
    assert (made.stats().tokens_drafted, made.stats().tokens_accepted) == (drafted, accepted)


@pytest.mark.parametrize("names", [("moon-large", "moon-small"), ("moon-small", "moon-large")])
def test_the_bundled_models_draft_for_each_other(start: Start, pool: EmbeddedPool, names: tuple[str, str]) -> None:
    """One of the two directions has a bundle, and converts the draft's prompts."""
    assert MODELS is not None
    c2c = bundled_system()[1]
    rule = any(r.source.name == names[0] for r in c2c.rules)
    made = start(MODELS / names[0], pool, c2c=c2c, draft=draft_of(MODELS / names[1]))
    text = "The harbour of the old town was quiet. Colour: red. Plant: moss. " * 4
    accepted = 0
    for n, sampling in ((70, SamplingParams()), (51, SamplingParams(temperature=0.4, seed=1))):
        request = GenerateRequest(prompt=made.encode(text)[:n], max_tokens=12, sampling=sampling, ignore_eos=True)
        plain, fast = both(made, request)
        assert same(plain, fast)
        accepted += fast.usage.accepted
        assert fast.usage.draft_converted == ((n // PAGE - 2) * PAGE if rule else 0)
    assert accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("names", [("moon-large", "moon-small"), ("moon-small", "moon-large")])
def test_long_answers_of_the_bundled_models(start: Start, pool: EmbeddedPool, names: tuple[str, str]) -> None:
    assert MODELS is not None
    made = start(MODELS / names[0], pool, c2c=bundled_system()[1], draft=draft_of(MODELS / names[1]))
    sources = sorted((Path(__file__).parents[2] / "src/moonpool").glob("*/*.py"))
    texts = [t for p in sources if len(t := p.read_text()) > 2000]
    for i, text in enumerate(texts[:40]):
        sampling = SAMPLINGS[i % 3]
        tokens = made.encode(text)[: 100 + 7 * i]
        request = GenerateRequest(prompt=tokens, max_tokens=96, sampling=sampling, ignore_eos=True, salt=str(i))
        plain = made.generate(dataclasses.replace(request, speculate=False, salt=f"plain {i}"))
        assert same(plain, made.generate(request)), i


def test_what_ends_a_plain_answer_ends_this_one_at_the_same_token(model: Path, near: Path, start: Start) -> None:
    made = start(model, draft=draft_of(near, tokens=5))
    base = GenerateRequest(prompt=prompt(40), max_tokens=16, ignore_eos=True)
    whole = made.generate(base)
    changed: tuple[dict[str, Any], ...] = (
        *({"max_tokens": n} for n in range(7)),
        *({"stop": (whole.text[n : n + 2],)} for n in range(2, 12, 3)),
        {"logprobs": 2},
        {"ignore_eos": False, "max_tokens": 40},
    )
    for changes in changed:
        plain, fast = both(made, dataclasses.replace(base, **changes))
        assert same(plain, fast), changes
        assert [t.token for t in fast.logprobs or ()] == [t.token for t in plain.logprobs or ()]


def test_an_end_that_is_guessed(start: Start, pool: EmbeddedPool) -> None:
    """`<|im_end|>` after the value: the end is no part of the answer."""
    assert MODELS is not None
    made = start(MODELS / "moon-large", draft=draft_of(MODELS / "moon-small"))
    asked = made.encode_chat([{"role": "user", "content": "Colour: red\nPlant: moss\nAnimal: fox\nColour:"}])
    plain, fast = both(made, GenerateRequest(prompt=asked, max_tokens=30))
    assert plain.finish_reason == "stop"
    assert same(plain, fast)


def test_a_draft_of_noise_leaves_no_trace(model: Path, tmp_path: Path, start: Start, pool: EmbeddedPool) -> None:
    """Guesses are refused at every length, and the pages stored are those of plain decoding."""
    made = start(model, pool, draft=draft_of(build(tmp_path / "noise", "qwen3", seed=9), tokens=7))
    request = GenerateRequest(prompt=prompt(24), max_tokens=40, ignore_eos=True)
    plain, fast = both(made, dataclasses.replace(request, salt="x"))
    assert same(plain, fast)
    assert fast.usage.accepted < fast.usage.drafted / 2
    made.generate(request)
    assert made.flush()
    over_pages = dataclasses.replace(request, prompt=[*request.prompt, *plain.tokens[:32]], max_tokens=8)
    again = made.generate(dataclasses.replace(over_pages, speculate=False))
    assert again.usage.native == 48
    assert again.tokens == plain.tokens[32:40]


def test_a_close_choice_is_computed_as_plain_decoding_does(model: Path, near: Path, start: Start) -> None:
    """With a bound that no choice is safe from, every token but the last pass's refused ones is computed twice, and once only."""
    made = start(model, draft=draft_of(near))
    everything = Speculation(made._runner, made._scheduler._speculation._draft, made._clock, noise=1e6)  # type: ignore[union-attr]
    made._scheduler._speculation = everything
    plain, fast = both(made, GenerateRequest(prompt=prompt(40), max_tokens=20, ignore_eos=True))
    assert same(plain, fast)
    assert 12 < fast.usage.replayed <= 19


def test_rounding_stays_far_below_the_bound(model: Path, start: Start) -> None:
    """The bound doubles what a replay finds, so after many of them it is the first one still."""
    made = start(model, draft=draft_of(model))
    for seed in range(3):
        made.generate(GenerateRequest(prompt=prompt(50, seed), max_tokens=32, sampling=SEEDED, ignore_eos=True))
    assert made.stats().tokens_replayed > 0
    assert made._scheduler._speculation._noise == NOISE[made._runner.dtype]  # type: ignore[union-attr]


def test_others_at_the_same_time_fall_back_to_the_batch(model: Path, near: Path, start: Start) -> None:
    made = start(model, draft=draft_of(near))
    requests = [GenerateRequest(prompt=prompt(20 + i, i), max_tokens=14 + 9 * i, ignore_eos=True) for i in range(3)]
    alone = [made.generate(dataclasses.replace(r, speculate=False)) for r in requests]
    streams = [made.stream(r) for r in requests]
    for want, stream in zip(alone, streams, strict=True):
        end = list(stream)[-1]
        assert isinstance(end, GenerateResult)
        assert end.tokens == want.tokens


def test_a_long_prompt_is_prepared_a_chunk_at_a_time(model: Path, near: Path, start: Start) -> None:
    """Each step of the draft's prefill goes with a plain token; then guesses begin."""
    made = start(model, draft=draft_of(near), limits=Limits(prefill_chunk=PAGE))
    request = GenerateRequest(prompt=prompt(5 * PAGE + 3), max_tokens=30, ignore_eos=True)
    plain, fast = both(made, request)
    assert same(plain, fast)
    assert fast.usage.drafted > 0
    short = made.generate(dataclasses.replace(request, max_tokens=5))
    assert (short.usage.drafted, short.tokens) == (0, plain.tokens[:5])


def test_drafts_that_cannot_be_are_refused(model: Path, start: Start) -> None:
    assert MODELS is not None
    with pytest.raises(ConversionRefused, match="tokenizer"):
        start(model, draft=draft_of(MODELS / "moon-small"))
    with pytest.raises(ConfigError, match=r"draft\.tokens"):
        start(model, draft=draft_of(model, tokens=0))
