"""The instance with a pool: what comes from the pool never changes an answer, and only native pages are stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moonpool.engine.instance import Instance
from moonpool.engine.request import GenerateRequest, GenerateResult
from moonpool.engine.sampling import SamplingParams
from moonpool.engine.scheduler import Limits
from moonpool.errors import ConfigError, ContextTooLong, RequestError, WireError
from moonpool.keys import PageKey
from moonpool.store.base import Match, ReadLease
from moonpool.store.embedded import EmbeddedPool
from tests.engine.conftest import PAGE, prompt, stored_pages

Start = Callable[..., Instance]
BUNDLE = "b" * 32


def request(tokens: list[int], **changes: Any) -> GenerateRequest:
    return dataclasses.replace(GenerateRequest(prompt=tokens, max_tokens=8, ignore_eos=True), **changes)


def keys(instance: Instance, tokens: Sequence[int]) -> list[PageKey]:
    return instance.spec.identity(PAGE).page_keys(tokens)


def put_converted(pool: EmbeddedPool, instance: Instance, tokens: Sequence[int], pages: Sequence[int]) -> None:
    """Converted pages as the converter would leave them; their content is noise."""
    noise = torch.Generator().manual_seed(0)
    shape = instance.spec.page_shape(PAGE)
    for i in pages:
        values = torch.randn(shape.nbytes // 2, generator=noise).bfloat16()
        pool.put(keys(instance, tokens)[i].converted(BUNDLE).text, values)


# -- native pages


def test_cold_equals_warm_for_every_hit_length(any_model: Path, start: Start) -> None:
    tokens = prompt(6 * PAGE + 3)
    cold = start(any_model).generate(request(tokens, prompt_logits=1))
    assert cold.prompt_logits is not None
    with EmbeddedPool(capacity=16 << 20) as pool:
        instance = start(any_model, pool)
        instance.generate(request(tokens))
        assert instance.flush()
        for hit in range(6, -1, -1):
            pool.batch_remove([k.text for k in keys(instance, tokens)[hit:]])
            warm = instance.generate(request(tokens, prompt_logits=1))
            assert instance.flush()
            pool.batch_remove([k.text for k in keys(instance, tokens)[hit:]])
            assert warm.usage.native == hit * PAGE
            assert warm.tokens == cold.tokens
            assert warm.prompt_logits is not None
            torch.testing.assert_close(warm.prompt_logits, cold.prompt_logits, atol=1e-4, rtol=1e-4)
        instance.close()


def test_with_page_sized_chunks_a_hit_is_bit_identical(model: Path, pool: EmbeddedPool, start: Start) -> None:
    tokens, limits = prompt(5 * PAGE + 2), Limits(prefill_chunk=PAGE)
    instance = start(model, pool, limits=limits)
    cold = instance.generate(request(tokens, prompt_logits=1))
    assert instance.flush()
    warm = instance.generate(request(tokens, prompt_logits=1))
    assert warm.usage.native == 5 * PAGE
    assert cold.prompt_logits is not None
    assert warm.prompt_logits is not None
    assert torch.equal(warm.prompt_logits, cold.prompt_logits)


@pytest.mark.parametrize("n", [1, PAGE - 1, PAGE, PAGE + 1, 4 * PAGE])
def test_a_full_hit_leaves_something_to_compute(model: Path, pool: EmbeddedPool, start: Start, n: int) -> None:
    instance, tokens = start(model, pool), prompt(n)
    cold = instance.generate(request(tokens))
    assert instance.flush()
    warm = instance.generate(request(tokens))
    assert warm.usage.native == (n - 1) // PAGE * PAGE
    assert warm.tokens == cold.tokens


def test_the_next_turn_finds_the_answers_pages(model: Path, pool: EmbeddedPool, start: Start) -> None:
    instance, tokens = start(model, pool), prompt(PAGE)
    first = instance.generate(request(tokens, max_tokens=2 * PAGE + 1))
    assert instance.flush()
    second = [*tokens, *first.tokens, 5]
    assert instance.generate(request(second)).usage.native == 3 * PAGE
    assert instance.generate(request(second)).tokens == start(model).generate(request(second)).tokens


def test_salts_share_no_pages(model: Path, pool: EmbeddedPool, start: Start) -> None:
    instance, tokens = start(model, pool), prompt(3 * PAGE)
    instance.generate(request(tokens, salt="a"))
    assert instance.flush()
    assert instance.generate(request(tokens, salt="b")).usage.native == 0
    assert instance.generate(request(tokens, salt="a")).usage.native == 2 * PAGE


def test_two_instances_share_the_pool(model: Path, pool: EmbeddedPool, start: Start) -> None:
    one, other, tokens = start(model, pool), start(model, pool), prompt(3 * PAGE + 1)
    cold = one.generate(request(tokens))
    assert one.flush()
    warm = other.generate(request(tokens))
    assert warm.usage.native == 3 * PAGE
    assert warm.tokens == cold.tokens


# -- converted pages


def test_converted_pages_are_taken_between_native_ends_and_taint(model: Path, pool: EmbeddedPool, start: Start) -> None:
    instance, tokens = start(model, pool, origins=[BUNDLE]), prompt(6 * PAGE)
    put_converted(pool, instance, tokens, range(6))
    result = instance.generate(request(tokens, max_tokens=2 * PAGE))
    assert (result.usage.converted, result.usage.native) == (4 * PAGE, 0)
    assert instance.flush()
    assert stored_pages(pool, instance, [*tokens, *result.tokens]) == [0], (
        "only page 0 stands in front of converted ones"
    )


def test_a_request_may_refuse_converted_pages(model: Path, pool: EmbeddedPool, start: Start) -> None:
    instance, tokens = start(model, pool, origins=[BUNDLE]), prompt(6 * PAGE)
    put_converted(pool, instance, tokens, range(6))
    without = start(model).generate(request(tokens))
    result = instance.generate(request(tokens, allow_converted=False))
    assert result.usage.converted == 0
    assert result.tokens == without.tokens
    assert instance.flush()
    assert stored_pages(pool, instance, tokens) == list(range(6))
    assert instance.generate(request(tokens)).usage.converted == 0, "native pages replace converted ones"


def test_native_pages_behind_converted_ones_are_taken(model: Path, pool: EmbeddedPool, start: Start) -> None:
    instance, tokens = start(model, pool, origins=[BUNDLE]), prompt(5 * PAGE)
    instance.generate(request(tokens))
    assert instance.flush()
    pool.batch_remove([k.text for k in keys(instance, tokens)[:3]])
    put_converted(pool, instance, tokens, [1, 2])
    usage = instance.generate(request(tokens)).usage
    assert (usage.converted, usage.native, usage.computed) == (2 * PAGE, PAGE, 2 * PAGE)


def test_prompt_logits_are_computed_not_loaded(model: Path, pool: EmbeddedPool, start: Start) -> None:
    instance, tokens = start(model, pool, origins=[BUNDLE]), prompt(6 * PAGE)
    put_converted(pool, instance, tokens, range(6))
    wanted = 2 * PAGE + 5
    off = instance.generate(request(tokens, max_tokens=0, prompt_logits=wanted, allow_converted=False, salt="x"))
    on = instance.generate(request(tokens, max_tokens=0, prompt_logits=wanted))
    assert on.usage.converted == 2 * PAGE
    for result in (off, on):
        assert result.prompt_logits is not None
        assert result.prompt_logits.shape == (wanted, instance.spec.vocab_size)
        assert result.tokens == ()
    assert off.prompt_logits is not None
    assert on.prompt_logits is not None
    assert (off.prompt_logits - on.prompt_logits).abs().max() > 0.1, "noise pages must show"


def test_a_request_can_wait_for_conversions(model: Path, pool: EmbeddedPool, start: Start) -> None:
    instance, tokens = start(model, pool, origins=[BUNDLE]), prompt(4 * PAGE + 1)
    done: list[Any] = []
    instance.submit(request(tokens, wait_converted_s=20.0), done.append)
    other = instance.generate(request(prompt(4, seed=9)))  # a waiting request delays nobody
    assert len(other.tokens) == 8
    assert not done
    put_converted(pool, instance, tokens, [1, 2])
    result = _wait(done)
    assert result.usage.converted == 2 * PAGE
    missed = instance.generate(request(prompt(4 * PAGE, seed=5), wait_converted_s=0.05))
    assert missed.usage.computed == 4 * PAGE


def _wait(events: list[Any]) -> GenerateResult:
    import time

    end = time.monotonic() + 20
    while time.monotonic() < end:
        for event in list(events):
            if isinstance(event, GenerateResult):
                return event
        time.sleep(0.01)
    raise AssertionError(f"no result: {events}")


# -- a pool that lets down


class FaultyPool(EmbeddedPool):
    """After a lookup, these pages vanish; or the pool cannot be reached."""

    vanish: tuple[int, ...] = ()
    down = False

    def lookup(self, keys: Sequence[PageKey], origins: Sequence[str] = ()) -> list[Match | None]:
        if self.down:
            raise WireError("down")
        found = super().lookup(keys, origins)
        self.batch_remove([keys[i].text for i in self.vanish])
        return found

    def open_read(self, keys: Sequence[str]) -> ReadLease:
        if self.down:
            raise WireError("down")
        return super().open_read(keys)


@pytest.mark.parametrize(("vanish", "native"), [((2, 3), 2), ((0,), 4), ((0, 1, 2, 3, 4), 0)])
def test_pages_that_vanish_after_the_lookup_are_computed(
    model: Path, start: Start, vanish: tuple[int, ...], native: int
) -> None:
    tokens = prompt(5 * PAGE + 1)
    with FaultyPool(capacity=16 << 20) as pool:
        instance = start(model, pool)
        cold = instance.generate(request(tokens))
        assert instance.flush()
        pool.vanish = vanish
        warm = instance.generate(request(tokens))
        assert warm.tokens == cold.tokens
        assert warm.usage.native == native * PAGE
        assert instance.stats().pages_vanished == len(vanish)
        instance.close()


def test_a_page_of_the_wrong_size_is_a_miss(model: Path, pool: EmbeddedPool, start: Start) -> None:
    instance, tokens = start(model, pool), prompt(3 * PAGE)
    pool.put(keys(instance, tokens)[0].text, b"short")
    result = instance.generate(request(tokens))
    assert result.usage.computed == 3 * PAGE
    assert instance.stats().pages_wrong_size == 1


def test_an_unreachable_pool_costs_time_not_answers(model: Path, start: Start) -> None:
    tokens = prompt(3 * PAGE)
    with FaultyPool(capacity=16 << 20) as pool:
        pool.down = True
        instance = start(model, pool)
        assert instance.generate(request(tokens)).tokens == start(model).generate(request(tokens)).tokens
        assert instance.stats().pool_errors == 1
        instance.close()


def test_a_full_pool_is_counted_and_harms_nothing(model: Path, start: Start) -> None:
    with EmbeddedPool(capacity=1 << 16) as pool:
        instance = start(model, pool)
        for seed in range(4):
            assert len(instance.generate(request(prompt(20 * PAGE, seed))).tokens) == 8
        assert instance.flush()
        instance.close()


# -- requests


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"prompt": []}, RequestError, "empty"),
        ({"prompt": [1] * 600}, ContextTooLong, "512"),
        ({"prompt": [10**6]}, RequestError, "no such token"),
        ({"max_tokens": -1}, RequestError, "max_tokens"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, RequestError, "temperature"),
        ({"sampling": SamplingParams(top_p=0.0)}, RequestError, "top_p"),
        ({"stop": ("",)}, RequestError, "stop"),
        ({"logprobs": 99}, RequestError, "logprobs"),
        ({"prompt_logits": 99}, RequestError, "prompt_logits"),
        ({"wait_converted_s": 1e9}, RequestError, "wait_converted_s"),
        ({"deadline_s": 0.0}, RequestError, "deadline_s"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(
    model: Path, start: Start, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        start(model).generate(request(prompt(4), **changes))


def test_limits_must_fit_the_pages(model: Path, start: Start) -> None:
    with pytest.raises(ConfigError, match="multiple of the page size"):
        start(model, limits=Limits(prefill_chunk=PAGE + 1))
