"""Which choices no rounding noise can change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.engine.margin import safe
from moonpool.engine.sampling import SamplingParams, make_generator, sample

SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=0.9, top_p=0.95),
    SamplingParams(temperature=0.7, top_p=0.5),
]


@pytest.mark.parametrize("params", SAMPLINGS)
@given(seed=st.integers(0, 1 << 32), noise=st.sampled_from([0.003, 0.03, 0.3]), spread=st.sampled_from([0.5, 3.0]))
@settings(max_examples=15, deadline=None)
def test_a_safe_choice_survives_the_noise(params: SamplingParams, seed: int, noise: float, spread: float) -> None:
    """Neither random logits within the bound nor those that work for or against each token lead to another choice."""
    random = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(24, generator=random)
    if not safe(logits, params, make_generator(seed), noise):
        return
    choice = sample(logits, params, make_generator(seed))
    worst = [torch.where(torch.arange(24) < n, 1.0, -1.0) for n in range(25)]
    drawn = [2 * torch.rand(24, generator=random) - 1 for _ in range(10)]
    for direction in [*worst, *(-w for w in worst), *drawn, *(d.sign() for d in drawn)]:
        assert sample(logits + 0.999 * noise * direction, params, make_generator(seed)) == choice


@pytest.mark.parametrize("params", SAMPLINGS)
def test_most_choices_are_safe_from_little_noise_and_none_from_much(params: SamplingParams) -> None:
    logits = 3 * torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    small, large = (sum(safe(x, params, make_generator(i), n) for i, x in enumerate(logits)) for n in (1e-4, 20.0))
    assert small >= 97
    assert large == 0


def test_looking_draws_nothing() -> None:
    looked, fresh = make_generator(3), make_generator(3)
    logits = torch.randn(40, generator=torch.Generator().manual_seed(0))
    safe(logits, SamplingParams(temperature=1.0), looked, 0.01)
    assert torch.equal(looked.get_state(), fresh.get_state())


def test_two_best_tokens_are_never_safe() -> None:
    assert not safe(torch.zeros(40), SamplingParams(), make_generator(1), 1e-6)
