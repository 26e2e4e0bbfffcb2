"""Whether a choice of `sampling.sample` is safe from rounding noise. Pure.

The same position computed among others (speculative verification) or alone (plain decoding) gives logits that differ in the
order of additions, and a little more where that flipped the bf16 rounding of a cached key or value. Given a bound `noise` on
that difference, a choice is *safe* if no logits within the bound could lead to another one. With every logit off by at most
`noise`, the odds of any set of tokens change by a factor of at most e^(2 noise / temperature).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from moonpool.engine.sampling import GREEDY_BELOW, SamplingParams, copied, sample

NOISE = {torch.float32: 0.02, torch.bfloat16: 0.5}
"""Bound on a logit's difference to begin with, by the type that the model computes in. fp32: over twice what was seen
(benchmarks/speculate.py)."""


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


def _moved(part: float, factor: float) -> float:
    """A share of all probability when its odds change by `factor`."""
    return factor * part / (1.0 + (factor - 1.0) * part)


def _kept(logits: Tensor, probs: Tensor, top_p: float, noise: float, factor: float) -> tuple[Tensor, Tensor]:
    """Which tokens the nucleus keeps whatever the noise is, and which it keeps with some noise: two bool `[vocab]`."""
    if top_p >= 1.0:
        every = torch.ones_like(probs, dtype=torch.bool)
        return every, every
    best, index = logits.sort(descending=True)
    rising, ordered = -best.double(), probs[index]
    mass = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])  # of the n best tokens

    def surely(n: int) -> bool:
        """Whether the n-th best is kept even if all that could come before it does."""
        before = int(torch.searchsorted(rising, rising[n] + 2 * noise, right=True))
        return _moved(max(0.0, float(mass[before] - ordered[n])), factor) < top_p

    def perhaps(n: int) -> bool:
        """Whether it is kept if only those come before it that must."""
        before = int(torch.searchsorted(rising, rising[n] - 2 * noise))
        return _moved(float(mass[before]), 1 / factor) < top_p

    def first(kept: Callable[[int], bool]) -> Tensor:
        """The tokens up to the last one that is kept: what holds for a token holds for all better ones."""
        count = bisect_left(range(len(best)), True, key=lambda n: not kept(n))
        return logits >= best[count - 1] if count else torch.zeros_like(logits, dtype=torch.bool)

    return first(surely), first(perhaps)
