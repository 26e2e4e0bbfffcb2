from __future__ import annotations

import pytest
import torch

from moonpool.engine.sampling import SamplingParams, make_generator, nucleus, sample, token_logprob

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0])


def draws(params: SamplingParams, n: int, logits: torch.Tensor = LOGITS) -> list[int]:
    generator = make_generator(params.seed)
    return [sample(logits, params, generator) for _ in range(n)]


def test_greedy_is_argmax_and_draws_nothing() -> None:
    generator = make_generator(1)
    before = generator.get_state().clone()
    assert sample(LOGITS, SamplingParams(), generator) == 1
    assert torch.equal(generator.get_state(), before)


def test_the_same_seed_gives_the_same_tokens_and_another_one_others() -> None:
    first = draws(SamplingParams(temperature=1.0, seed=5), 50)
    assert draws(SamplingParams(temperature=1.0, seed=5), 50) == first
    assert draws(SamplingParams(temperature=1.0, seed=6), 50) != first
    assert draws(SamplingParams(temperature=1.0), 50) != draws(SamplingParams(temperature=1.0), 50)


def test_rounding_noise_in_the_logits_does_not_change_the_tokens() -> None:
    noise = 1e-6 * torch.tensor([1.0, -1.0, 1.0, -1.0])
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=9)
    assert draws(params, 200) == draws(params, 200, LOGITS + noise)


def test_frequencies_follow_the_distribution() -> None:
    n = 4000
    counts = torch.bincount(torch.tensor(draws(SamplingParams(temperature=1.0, seed=0), n)), minlength=4) / n
    torch.testing.assert_close(counts, LOGITS.softmax(-1), atol=0.03, rtol=0)


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, {1}), (0.7, {1, 2}), (0.97, {0, 1, 2}), (1.0, {0, 1, 2, 3})])
def test_nucleus_is_the_smallest_set_that_suffices(top_p: float, kept: set[int]) -> None:
    assert set(nucleus(LOGITS.double().softmax(-1), top_p).nonzero().flatten().tolist()) == kept
    assert set(draws(SamplingParams(temperature=1.0, top_p=top_p, seed=1), 500)) <= kept


def test_logprobs_are_of_the_untempered_distribution() -> None:
    found = token_logprob(LOGITS, 2, top=2)
    want = LOGITS.log_softmax(-1)
    assert found.logprob == pytest.approx(float(want[2]))
    assert [t for t, _ in found.top] == [1, 2]


def test_extreme_temperatures_stay_in_the_vocabulary() -> None:
    for temperature in (1e-300, 1e-6, 1e-5, 100.0):
        tokens = draws(SamplingParams(temperature=temperature, top_p=0.5, seed=2), 20, LOGITS * 50)
        assert set(tokens) <= {0, 1, 2, 3}
    assert set(draws(SamplingParams(temperature=1e-300, seed=2), 20)) == {1}
