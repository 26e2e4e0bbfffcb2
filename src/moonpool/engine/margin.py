"""Whether a choice of `sampling.sample` is safe from rounding noise. Pure.

The same position computed among others (speculative verification) or alone (plain decoding) gives logits that differ in the
order of additions, and a little more where that flipped the bf16 rounding of a cached key or value. Given a bound `noise` on
that difference, a choice is *safe* if no logits within the bound could lead to another one. With every logit off by at most
`noise`, each sum of probabilities F is off by at most F (1 - F) (e^(2 noise / temperature) - 1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moonpool.engine.sampling import GREEDY_BELOW, SamplingParams, nucleus

NOISE = {torch.float32: 0.05, torch.bfloat16: 0.5}
"""Bound on a logit's difference, by the type that the model computes in; over twice what was seen (benchmarks/speculate.py)."""


def safe(logits: Tensor, params: SamplingParams, generator: torch.Generator, noise: float) -> bool:
    """Whether `sample` would choose the same token from any logits within `noise` of `logits` `[vocab]`. The generator stays
    as it is: the number that `sample` will draw is looked at on a copy."""
    if params.temperature < GREEDY_BELOW:
        best = logits.topk(2).values
        return float(best[0] - best[1]) > 2 * noise
    slack = math.expm1(min(2 * noise / params.temperature, 50.0))
    probs = torch.softmax(logits.double() / params.temperature, dim=-1)
    if params.top_p < 1.0:
        if not _nucleus_safe(logits, probs, params.top_p, noise, slack):
            return False
        probs = nucleus(probs, params.top_p)
        probs /= probs.sum()
    copy = torch.Generator()
    copy.set_state(generator.get_state())
    uniform = float(torch.rand((), dtype=torch.float64, generator=copy))
    cumulative = probs.cumsum(-1)
    token = int(torch.searchsorted(cumulative, uniform, right=True))
    if token >= probs.numel():
        return False
    below = float(cumulative[token - 1]) if token else 0.0
    above = float(cumulative[token])
    return uniform - below > _reach(below, slack) - (below == 0.0) and above - uniform > _reach(above, slack)


def _reach(total: float, slack: float) -> float:
    """How far a sum of probabilities may move."""
    return max(0.0, total * (1.0 - total)) * slack


def _nucleus_safe(logits: Tensor, probs: Tensor, top_p: float, noise: float, slack: float) -> bool:
    """Whether noise could change which tokens the nucleus keeps: their order at its edge, or the place where it is cut."""
    kept = nucleus(probs, top_p) > 0
    if not bool(kept.all()) and float(logits[kept].min() - logits[~kept].max()) <= 2 * noise:
        return False
    mass = float(probs[kept].sum())
    before = mass - float(probs[kept].min())
    cut = mass - top_p > _reach(mass, slack) or bool(kept.all())
    return cut and (top_p - before > _reach(before, slack) or int(kept.sum()) == 1)
