"""From logits to a token. Pure: the random number comes from the request's own generator.

One uniform number is drawn per token and put through the inverse of the distribution in *vocabulary order*. So the same seed
gives the same answer whatever else is in the batch: there is one draw per token, and rounding noise in the logits (batched
matrix products add in another order) only moves the borders between tokens by as much.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
"""Dividing by less than this overflows, and the distribution is one point anyway."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0 is greedy; `top_p` in (0, 1] keeps the smallest set of tokens with at least that probability."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms under the model's own distribution (temperature 1, no top_p); `top` is sorted, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def make_generator(seed: int | None) -> torch.Generator:
    """A CPU generator; without a seed it starts from the operating system's entropy, never from torch's global state."""
    generator = torch.Generator()
    return generator.manual_seed(secrets.randbits(63) if seed is None else seed % (1 << 63))


def copied(generator: torch.Generator) -> torch.Generator:
    """One that will give the same numbers."""
    copy = torch.Generator()
    copy.set_state(generator.get_state())
    return copy


def sample(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """One token id from `logits` `[vocab]` (CPU). Greedy draws nothing; otherwise exactly one number is drawn."""
    if params.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    uniform = float(torch.rand((), dtype=torch.float64, generator=generator))
    probs = torch.softmax(logits.double() / params.temperature, dim=-1)
    if params.top_p < 1.0:
        probs = nucleus(probs, params.top_p)
    cumulative = probs.cumsum(-1)
    token = int(torch.searchsorted(cumulative, uniform * float(cumulative[-1]), right=True))
    return min(token, int(probs.nonzero()[-1]))


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """`probs` with everything outside the smallest set of mass >= top_p set to zero (not renormalised). The best token stays."""
    ordered, index = probs.sort(descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    keep = before < top_p
    keep[0] = True
    kept = torch.zeros_like(probs)
    kept[index[keep]] = ordered[keep]
    return kept


def token_logprob(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """Log probability of `token` and of the `top` best, from `logits` `[vocab]`."""
    scores = torch.log_softmax(logits.float(), dim=-1)
    best = scores.topk(min(top, scores.numel())) if top else None
    pairs = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)) if best is not None else ()
    return TokenLogprob(token, float(scores[token]), pairs)
