"""Speculative decoding: whatever the draft guesses and whatever its cache holds, the answer is plain decoding's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from moonpool import paths
from moonpool.c2c.config import C2CConfig
from moonpool.c2c.signature import load_spec
from moonpool.engine.draft import DraftModel
from moonpool.engine.instance import Instance
from moonpool.engine.margin import safe
from moonpool.engine.request import GenerateRequest, GenerateResult
from moonpool.engine.sampling import SamplingParams, make_generator, sample
from moonpool.errors import ConfigError, ConversionRefused
from moonpool.store.embedded import EmbeddedPool
from moonpool.system import bundled_system
from tests.engine.models import build

MODELS = paths.repo_dir("models")
assert MODELS is not None
LARGE, SMALL = MODELS / "moon-large", MODELS / "moon-small"
TEXTS = (
    "The harbour of the old town was quiet. ",
    "Return the number of items in the list, or raise ValueError if it is empty. ",
    "def read(path):\n    with open(path) as f:\n        return f.read()\n",
)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11)


def instance(
    pool: EmbeddedPool | None, c2c: C2CConfig | None = None, *, draft: Path = SMALL, tokens: int = 4
) -> Instance:
    model = DraftModel(ref=str(draft), spec=load_spec(draft), tokens=tokens)
    return Instance(LARGE, load_spec(LARGE), pool, page_size=16, c2c=c2c, draft=model, compute="float32")


@pytest.fixture(scope="module")
def large() -> Iterator[Instance]:
    """Its draft's prompts are converted from its own cache."""
    with EmbeddedPool(32 << 20) as pool, instance(pool, bundled_system()[1]) as made:
        yield made


@pytest.fixture(scope="module")
def prompts(large: Instance) -> list[list[int]]:
    return [large.encode(text * 12)[: 40 + 23 * i] for i, text in enumerate(TEXTS)]


def both(instance: Instance, request: GenerateRequest) -> tuple[GenerateResult, GenerateResult]:
    """(plain, speculative)"""
    return instance.generate(dataclasses.replace(request, speculate=False)), instance.generate(request)


@pytest.mark.parametrize("sampling", [SamplingParams(), SEEDED])
def test_the_answer_is_plain_decodings(large: Instance, prompts: list[list[int]], sampling: SamplingParams) -> None:
    accepted = 0
    for prompt in prompts:
        request = GenerateRequest(prompt=prompt, max_tokens=12, sampling=sampling, ignore_eos=True, logprobs=1)
        plain, fast = both(large, request)
        assert (fast.tokens, fast.text, fast.finish_reason) == (plain.tokens, plain.text, plain.finish_reason)
        assert plain.logprobs is not None
        assert fast.logprobs is not None
        for a, b in zip(plain.logprobs, fast.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=0.05)
        assert (plain.usage.drafted, plain.usage.accepted) == (0, 0)
        assert fast.usage.drafted >= fast.usage.accepted
        accepted += fast.usage.accepted
    assert accepted > 0, "a draft that is never right proves little"


def test_what_ends_a_plain_answer_ends_this_one_at_the_same_token(large: Instance, prompts: list[list[int]]) -> None:
    base = GenerateRequest(prompt=prompts[1], max_tokens=12)
    text = large.generate(base).text
    for changes in (
        *({"max_tokens": n} for n in (0, 1, 3, 6)),
        {"stop": (text[5:7],)},
        {"stop": (text[11:12],)},
        {"ignore_eos": True, "max_tokens": 14},
    ):
        plain, fast = both(large, dataclasses.replace(base, **changes))
        assert (fast.tokens, fast.text, fast.finish_reason) == (plain.tokens, plain.text, plain.finish_reason), changes


def test_an_answer_that_ends_itself(large: Instance) -> None:
    """`<|im_end|>` after the value: the end is guessed or not, and is no part of the answer."""
    asked = large.encode_chat([{"role": "user", "content": "Colour: red\nPlant: moss\nAnimal: fox\nColour:"}])
    plain, fast = both(large, GenerateRequest(prompt=asked, max_tokens=60))
    assert plain.finish_reason == "stop"
    assert (fast.tokens, fast.finish_reason) == (plain.tokens, "stop")


def test_a_draft_of_noise_costs_nothing_but_time(tmp_path: Path, prompts: list[list[int]]) -> None:
    """Guesses are refused at every length; rolled back, they leave no trace, and stored pages are those of plain decoding."""
    other = build(tmp_path / "noise", "qwen3", seed=9)
    spec = msgspec.structs.replace(load_spec(other), tokenizer=load_spec(LARGE).tokenizer)
    with EmbeddedPool(32 << 20) as pool:
        model = DraftModel(ref=str(other), spec=spec, tokens=7)
        with Instance(LARGE, load_spec(LARGE), pool, page_size=16, draft=model, compute="float32") as made:
            request = GenerateRequest(prompt=[t % 250 for t in prompts[0]], max_tokens=30, ignore_eos=True)
            plain, fast = both(made, request)
            assert fast.tokens == plain.tokens
            again, _ = both(
                made, dataclasses.replace(request, prompt=[*request.prompt, *plain.tokens[:24]], max_tokens=6)
            )
            assert again.tokens == plain.tokens[24:30], "over pages that the speculative run stored"


def test_others_at_the_same_time_fall_back_to_the_batch(large: Instance, prompts: list[list[int]]) -> None:
    alone = [
        large.generate(GenerateRequest(prompt=p, max_tokens=14, ignore_eos=True, speculate=False)) for p in prompts
    ]
    streams = [large.stream(GenerateRequest(prompt=p, max_tokens=14, ignore_eos=True)) for p in prompts]
    ends = [list(stream)[-1] for stream in streams]
    for want, end in zip(alone, ends, strict=True):
        assert isinstance(end, GenerateResult)
        assert end.tokens == want.tokens


def test_counts_reach_the_stats(large: Instance, prompts: list[list[int]]) -> None:
    before = large.stats()
    result = large.generate(GenerateRequest(prompt=prompts[2], max_tokens=20, ignore_eos=True))
    after = large.stats()
    assert after.tokens_drafted - before.tokens_drafted == result.usage.drafted > 0
    assert after.tokens_accepted - before.tokens_accepted == result.usage.accepted


def test_without_pool_and_without_bundle_the_draft_computes_its_prompt(prompts: list[list[int]]) -> None:
    with instance(None, tokens=2) as made:
        plain, fast = both(made, GenerateRequest(prompt=prompts[1], max_tokens=20, ignore_eos=True))
        assert fast.tokens == plain.tokens
        assert fast.usage.drafted > 0


def test_drafts_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionRefused, match="tokenizer"):
        instance(None, draft=build(tmp_path / "other", "qwen3", seed=1))
    with pytest.raises(ConfigError, match=r"draft\.tokens"):
        instance(None, tokens=0)


@pytest.mark.parametrize("params", [SamplingParams(), SEEDED, SamplingParams(temperature=1.3, seed=5)])
def test_a_safe_choice_survives_the_noise(params: SamplingParams) -> None:
    """Random logits within the bound never lead from a safe choice to another one; and the look at the number draws nothing."""
    noise, kept = 0.01, 0
    random = torch.Generator().manual_seed(0)
    for seed in range(60):
        logits = 3 * torch.randn(40, generator=random)
        if not safe(logits, params, make_generator(seed), noise):
            continue
        kept += 1
        looked = make_generator(seed)
        assert safe(logits, params, looked, noise)
        choice = sample(logits, params, looked)
        for _ in range(8):
            other = logits + noise * (2 * torch.rand(40, generator=random) - 1)
            assert sample(other, params, make_generator(seed)) == choice
    assert kept > 10
    assert not safe(torch.zeros(40), SamplingParams(), make_generator(1), noise), "equal logits are never safe"
