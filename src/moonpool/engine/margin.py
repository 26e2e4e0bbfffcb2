"""Whether a choice of `sampling.sample` is safe from rounding noise. Pure.

The same position computed among others (speculative verification) or alone (plain decoding) gives logits that differ in the
order of additions, and a little more where that flipped the bf16 rounding of a cached key or value. Given a bound `noise` on
that difference, a choice is *safe* if no logits within the bound could lead to another one. With every logit off by at most
`noise`, the odds of any set of tokens change by a factor of at most e^(2 noise / temperature).
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from moonpool.engine.sampling import GREEDY_BELOW, SamplingParams, copied, sample

NOISE = {torch.float32: 0.02, torch.bfloat16: 0.5}
"""Bound on a logit's difference to begin with, by the type that the model computes in. fp32: over twice what was seen
(benchmarks/speculate.py)."""

Mass = TypeVar("Mass", float, Tensor)


def safe(logits: Tensor, params: SamplingParams, generator: torch.Generator, noise: float) -> bool:
    """Whether `sample` would choose the same token from any logits within `noise` of `logits` `[vocab]`. The generator stays
    as it is: the number that `sample` will draw is looked at on a copy."""
    if params.temperature < GREEDY_BELOW:
        best = logits.topk(2).values
        return float(best[0] - best[1]) > 2 * noise
    token = sample(logits, params, copied(generator))
    uniform = float(torch.rand((), dtype=torch.float64, generator=copied(generator)))
    factor = math.exp(min(2 * noise / params.temperature, 50.0))
    probs = torch.softmax(logits.double() / params.temperature, dim=-1)
    surely, perhaps = _kept(logits, probs, params.top_p, noise, factor)
    if not surely[token]:
        return False
    sure, most = probs * surely, probs * perhaps
    begin = _part(most[:token].sum(), sure[token:].sum())
    end = _part(sure[: token + 1].sum(), most[token + 1 :].sum())
    return _moved(begin, factor) <= uniform < _moved(end, 1 / factor)


def _part(one: Tensor, rest: Tensor) -> float:
    return float(one / (one + rest))


def _moved(part: Mass, factor: float) -> Mass:
    """A share of all probability when its odds change by `factor`."""
    return factor * part / (1.0 + (factor - 1.0) * part)


def _kept(logits: Tensor, probs: Tensor, top_p: float, noise: float, factor: float) -> tuple[Tensor, Tensor]:
    """Which tokens the nucleus keeps whatever the noise is, and which it keeps with some noise: two bool `[vocab]`."""
    if top_p >= 1.0:
        every = torch.ones_like(probs, dtype=torch.bool)
        return every, every
    ascending, index = logits.double().sort()
    behind = torch.cat([probs.new_zeros(1), probs[index].flip(0).cumsum(0)])  # mass of the n best tokens
    wide = 2 * noise
    could_lead = len(logits) - torch.searchsorted(ascending, logits.double() - wide)
    must_lead = len(logits) - torch.searchsorted(ascending, logits.double() + wide, right=True)
    most, least = behind[could_lead] - probs, behind[must_lead]
    surely = (_moved(most.clamp(0.0, 1.0), factor) < top_p) | (could_lead == 1)
    return surely, (_moved(least, 1 / factor) < top_p) | (must_lead == 0)
