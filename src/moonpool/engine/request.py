"""What goes into an instance and what comes out of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import Tensor

from moonpool.engine.sampling import SamplingParams, TokenLogprob
from moonpool.errors import ContextTooLong, MoonpoolError, RequestError

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_PROMPT_LOGITS = 4096

FinishReason = Literal["stop", "length", "abort"]


class QueueFull(MoonpoolError):
    """As many requests wait as the instance allows; try again later (HTTP 429)."""


class EngineClosed(MoonpoolError):
    """The instance is closing or closed (HTTP 503)."""


class EngineFailed(MoonpoolError):
    """The model raised while it computed this request; the instance goes on (HTTP 500)."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One prompt and how to continue it."""

    prompt: list[int]
    """Token ids; at least one."""
    max_tokens: int = 16
    """At most so many tokens are generated; 0 only computes the prompt (and stores its pages)."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Per generated token: its log probability and so many alternatives. None: not wanted."""
    prompt_logits: int = 0
    """Logits of so many trailing prompt positions are returned; those positions are computed, never loaded."""
    allow_converted: bool | None = None
    """Take converted pages: yes, no, or (None) as the rules say."""
    wait_converted_s: float = 0.0
    """Wait so long for conversions that are under way. 0: a page that is not there is a miss."""
    speculate: bool = True
    """Let the instance's draft, if it has one, guess ahead. The answer is the same."""
    salt: str = ""
    """Requests of different salts share no pages."""
    deadline_s: float = 600.0
    """From submission to the last token; after it the request fails with DeadlineExceeded."""

    def validate(self, *, max_positions: int, vocab_size: int) -> None:
        """Raises RequestError or ContextTooLong; every message names need and have."""
        _check(bool(self.prompt), "the prompt is empty", need="at least one token", have="0")
        bad = next((t for t in self.prompt if not 0 <= t < vocab_size), None)
        _check(bad is None, "no such token id", need=f"0..{vocab_size - 1}", have=str(bad))
        _check(self.max_tokens >= 0, "max_tokens must not be negative", have=str(self.max_tokens))
        total = len(self.prompt) + self.max_tokens
        if total > max_positions:
            raise ContextTooLong(
                f"prompt ({len(self.prompt)} tokens) and answer ({self.max_tokens}) exceed the model's context",
                need=f"{total} positions",
                have=f"{max_positions}",
                fix="Shorten the prompt or lower max_tokens.",
            )
        t, p = self.sampling.temperature, self.sampling.top_p
        _check(math.isfinite(t) and 0.0 <= t <= 100.0, "temperature out of range", need="0..100", have=str(t))
        _check(math.isfinite(p) and 0.0 < p <= 1.0, "top_p out of range", need="0 < top_p <= 1", have=str(p))
        _check(len(self.stop) <= MAX_STOPS, "too many stop strings", need=f"<= {MAX_STOPS}", have=str(len(self.stop)))
        fits = all(0 < len(s) <= MAX_STOP_CHARS for s in self.stop)
        _check(fits, "stop string empty or too long", need=f"1..{MAX_STOP_CHARS} characters")
        _check(0 <= (self.logprobs or 0) <= MAX_LOGPROBS, "logprobs out of range", need=f"0..{MAX_LOGPROBS}")
        limit = min(len(self.prompt), MAX_PROMPT_LOGITS)
        _check(0 <= self.prompt_logits <= limit, "prompt_logits out of range", need=f"0..{limit}")
        waits = math.isfinite(self.wait_converted_s) and 0.0 <= self.wait_converted_s <= 60.0
        _check(waits, "wait_converted_s out of range", need="0..60", have=str(self.wait_converted_s))
        _check(self.deadline_s > 0.0, "deadline_s must be positive", have=str(self.deadline_s))


def _check(ok: bool, what: str, *, need: str = "", have: str = "") -> None:
    if not ok:
        raise RequestError(what, need=need, have=have)


@dataclass(slots=True)
class Timing:
    """Seconds. `queue` ends when loading begins; `ttft` runs from submission to the first token."""

    queue: float = 0.0
    lookup: float = 0.0
    load: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    draft: float = 0.0
    """Part of `decode`: until the draft had the prompt's cache."""
    ttft: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `native + converted + computed == prompt`."""

    prompt: int
    completion: int
    native: int
    converted: int
    computed: int
    declined: int = 0
    """Of those computed: a conversion could have given them, but computing them was faster."""
    shared: int = 0
    """Of the native ones: read from another model that has the same KV."""
    fused: int = 0
    """Whose cache was improved with another model's, however the target had come by it."""
    bundles: tuple[str, ...] = ()
    """Digests of the bundles that made the converted ones."""
    forced: tuple[str, ...] = ()
    """Of these: served although the gate refused them."""
    drafted: int = 0
    """Tokens of the answer that the draft guessed."""
    accepted: int = 0
    """Of these: right."""
    replayed: int = 0
    """Computed once more, one by one, because rounding could have decided between two tokens."""
    draft_native: int = 0
    """Prompt tokens of the draft's cache from its own pages in the pool."""
    draft_converted: int = 0
    """From pages converted from another model's, ahead or for this request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    tokens: tuple[int, ...]
    """Generated ids; an end-of-sequence token is not among them."""
    text: str
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One per generated token, if asked for."""
    prompt_logits: Tensor | None = None
    """float32 `[prompt_logits, vocab]` on the CPU: the last row predicts the first generated token."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that became certain."""

    text: str


Event: TypeAlias = Piece | GenerateResult | MoonpoolError
"""Pieces, then exactly one result or error."""

OnEvent: TypeAlias = Callable[[Event], None]
"""Called from the engine's threads: must return at once and must not raise."""


class Handle:
    """A submitted request. `abort` may be called from any thread, at any time, more than once."""

    def __init__(self) -> None:
        self._aborted = threading.Event()

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()

    def abort(self) -> None:
        """Stop soon: no further token is computed and everything the request held is given back."""
        self._aborted.set()
