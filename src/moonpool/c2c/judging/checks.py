"""Measures that take more passes than the arms do, each on a few documents: quality by prefix length and far beyond it, drift over
a conversation, greedy answers.

All take a document's `native` cache and its `mapped` one (first page native), both from position 0 on. Maps work token by token, so
the cache of a shorter prefix is the start of a longer one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moonpool.c2c.fitting.capture import KV, CausalModel, concat
from moonpool.c2c.judging.report import LengthCheck, recovery

TURNS = 4


@dataclass(frozen=True, slots=True)
class Caches:
    """A document and the KV of its start."""

    document: Tensor
    native: KV
    mapped: KV


def kl(native: Tensor, arm: Tensor) -> Tensor:
    """KL(native ‖ arm) per token, nats; both logits or log-probabilities `[M, vocab]`. Of vocabularies padded differently the
    common part counts."""
    common = min(native.shape[1], arm.shape[1])
    p, q = (x[:, :common].log_softmax(-1) for x in (native, arm))
    return (p.exp() * (p - q)).sum(-1)


def same(native: Tensor, arm: Tensor) -> Tensor:
    """Per token: whether the most likely next token is native's."""
    return arm.argmax(-1) == native.argmax(-1)


def nll(logits: Tensor, follows: Tensor) -> Tensor:
    """Negative log-likelihood of each token that follows, nats."""
    return -logits.log_softmax(-1).gather(1, follows[:, None])[:, 0]


@dataclass(frozen=True, slots=True)
class Point:
    """Per-token measures behind one prefix of one document."""

    tokens: int
    kl: Tensor
    same: Tensor
    nll: tuple[Tensor, Tensor, Tensor]
    """Native, mapped, no context."""


def at_length(model: CausalModel, caches: Caches, tokens: int, continuation: int) -> Point:
    """The mapped arm behind a prefix of `tokens`."""
    said = caches.document[tokens : tokens + continuation]
    follows = caches.document[tokens + 1 : tokens + continuation + 1]
    native, mapped = (model.logits(kv[:tokens], said).cpu() for kv in (caches.native, caches.mapped))
    none = model.logits(None, said).cpu()
    found = nll(native, follows), nll(mapped, follows), nll(none, follows)
    return Point(tokens, kl(native, mapped), same(native, mapped), found)


def length_check(points: Sequence[Point]) -> LengthCheck:
    """Sums up points of one prefix length, one for each document."""
    native, mapped, none = (float(torch.cat([p.nll[i] for p in points]).double().mean()) for i in range(3))
    return LengthCheck(
        tokens=points[0].tokens,
        documents=len(points),
        kl_mean=float(torch.cat([p.kl for p in points]).double().mean()),
        top1=float(torch.cat([p.same for p in points]).double().mean()),
        recovery=recovery(native, none, mapped),
    )


def lengths(prefix: int, page_size: int) -> list[int]:
    """An eighth, a quarter, half and all of the prefix, in whole pages, two at least."""
    parts = {max(2 * page_size, prefix // n // page_size * page_size) for n in (8, 4, 2, 1)}
    return sorted(parts)


def turns(model: CausalModel, caches: Caches, page_size: int) -> list[Tensor]:
    """KL per token of each answer of a conversation.

    The document is cut into equal pieces, by turns a prompt and an answer. A prompt's KV comes from the map; an answer is computed
    by the target over all that is before it, and its KV stays. Native has computed everything itself.
    """
    covered = len(caches.mapped)
    piece = max(page_size, covered // (2 * TURNS) // page_size * page_size)
    count = min(TURNS, covered // (2 * piece))
    native = model.logits(caches.native[:piece], caches.document[piece : 2 * piece * count])
    cache, found = caches.mapped[:0], []
    for turn in range(count):
        start = 2 * piece * turn
        cache = concat([cache, caches.mapped[start : start + piece]])
        logits, cache = model.extend(cache, caches.document[start + piece : start + 2 * piece])
        found.append(kl(native[start : start + piece], logits).cpu())
    return found


def generated(model: CausalModel, caches: Caches, prefix: int, count: int) -> float:
    """Share of the native greedy answer's tokens before the first that the answer over the mapped cache does not share. The answer
    ends after `count` tokens or with the tokenizer's end of text."""
    asked = caches.document[prefix : prefix + 1]
    native, mapped = (model.greedy(kv[:prefix], asked, count) for kv in (caches.native, caches.mapped))
    end = model.tokenizer.eos_token_id
    if end in native:
        native = native[: native.index(end) + 1]
    differ = (i for i, (a, b) in enumerate(zip(native, mapped, strict=False)) if a != b)
    return next(differ, len(native)) / len(native)
