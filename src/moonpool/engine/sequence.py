"""One request on its way through the engine. Owned by one thread at a time: first the loader, then the model thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moonpool.engine.cache import SequenceKV
from moonpool.engine.fuse import SourceKV, Unfused
from moonpool.engine.plan import Kind, Load, PrefixPlan
from moonpool.engine.request import (
    Event,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Handle,
    OnEvent,
    Piece,
    Timing,
    Usage,
)
from moonpool.engine.sampling import TokenLogprob, make_generator, sample, token_logprob
from moonpool.engine.text import IncrementalText, StopBuffer
from moonpool.keys import KVIdentity, PageKey

if TYPE_CHECKING:
    from moonpool.engine.draft import Drafting

log = logging.getLogger(__name__)


class RunningSequence:
    """State of one request: plan and cursor through the prompt, then the answer so far."""

    def __init__(
        self,
        request: GenerateRequest,
        on_event: OnEvent,
        *,
        identity: KVIdentity,
        decode: Callable[[Sequence[int]], str],
        eos: frozenset[int],
        now: float,
    ) -> None:
        self.request, self.identity = request, identity
        self.handle = Handle()
        self.timing = Timing()
        self.submitted, self.deadline = now, now + request.deadline_s
        self.wait_until, self.poll_at = now + request.wait_converted_s, now
        self.keys: list[PageKey] | None = None
        self.kv: SequenceKV | None = None
        self.plan: PrefixPlan | None = None
        self.generated: list[int] = []
        self.fusing: SourceKV | Unfused | None = None  # None: nobody wants this request fused
        self.fused = False
        self.forced: tuple[str, ...] = ()
        self.drafting: Drafting | None = None  # None: nothing is guessed for this request
        self.draft_plan: PrefixPlan | None = None  # how the draft's cache of the prompt was made
        self.drafted = self.accepted = self.replayed = 0
        self.stored_to = 0  # pages below this index were offered to the pool
        self.finish_reason: FinishReason | None = None
        self._cursor = 0
        self._on_event = on_event
        self._eos = frozenset() if request.ignore_eos else eos
        self.generator = make_generator(request.sampling.seed)
        self._incremental, self._stop = IncrementalText(decode), StopBuffer(request.stop)
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logits: list[Tensor] = []
        self.closed = False

    # -- prompt

    @property
    def prefilled(self) -> bool:
        return self.kv is not None and self.kv.length >= len(self.request.prompt)

    def next_chunk(self, limit: int) -> list[int]:
        """The prompt tokens to compute next: up to the next multiple of `limit`, or to the end of the plan's step.

        Cutting at absolute multiples makes the chunks behind a hit the very chunks of a run without one. A sequence that is to
        be fused stops before its last token, for that.
        """
        assert self.kv is not None
        assert self.plan is not None
        while isinstance(step := self.plan.steps[self._cursor], Load):
            self.kv.length = step.end * self.plan.page_size
            self._cursor += 1
        start = self.kv.length
        end = min(step.end, (start // limit + 1) * limit)
        if isinstance(self.fusing, SourceKV) and start < len(self.request.prompt) - 1:
            end = min(end, len(self.request.prompt) - 1)
        if end == step.end:
            self._cursor += 1
        return self.request.prompt[start:end]

    def fuse_now(self) -> SourceKV | None:
        """What to fuse with before the chunk that `next_chunk` gave; None if this is not the time, or nothing is wanted."""
        assert self.kv is not None
        if self.fused or self.kv.length != len(self.request.prompt) - 1:
            return None
        return self.fusing if isinstance(self.fusing, SourceKV) else None

    def wanted_logits(self, end: int, count: int) -> int:
        """How many of the last `count` positions before `end` have logits that somebody wants."""
        first = len(self.request.prompt) - max(1, self.request.prompt_logits)
        return max(0, min(count, end - first))

    def keep_prompt_logits(self, logits: Tensor) -> None:
        """`logits` `[n, vocab]` of the positions that `wanted_logits` named."""
        if self.request.prompt_logits:
            self._prompt_logits.append(logits)

    # -- answer

    def accept(self, logits: Tensor, now: float) -> None:
        """Choose the next token from `logits` `[vocab]`, send the text that became certain, notice the end."""
        if self.request.max_tokens == 0:
            self.finish_reason = "length"
            return
        if not self.generated:
            self.timing.ttft = now - self.submitted
        token = sample(logits, self.request.sampling, self.generator)
        if token in self._eos:
            self.finish_reason = "stop"
            return
        self.generated.append(token)
        if self.request.logprobs is not None:
            self._logprobs.append(token_logprob(logits, token, self.request.logprobs))
        self._send_text(self._stop.push(self._incremental.push(token)))
        if self._stop.stopped:
            self.finish_reason = "stop"
        elif len(self.generated) >= self.request.max_tokens:
            self.finish_reason = "length"

    def _send_text(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._emit(Piece(text))

    # -- end

    def finish(self, now: float) -> None:
        """Send the rest of the text and the result, and let go of the cache."""
        if self.closed:
            return
        reason = self.finish_reason or "abort"
        if reason != "abort":
            self._send_text(self._stop.push(self._incremental.finish()) + self._stop.finish())
        self.timing.total = now - self.submitted
        wants = self.request.logprobs is not None
        self._close(
            GenerateResult(
                tokens=tuple(self.generated),
                text="".join(self._pieces),
                finish_reason=reason,
                usage=self.usage,
                timing=self.timing,
                logprobs=tuple(self._logprobs) if wants else None,
                prompt_logits=torch.cat(self._prompt_logits) if self._prompt_logits else None,
            )
        )

    def fail(self, event: Event) -> None:
        """Send an error instead of a result, and let go of the cache."""
        if not self.closed:
            self._close(event)

    def _close(self, event: Event) -> None:
        self.closed = True
        self.kv = self.drafting = None
        self._prompt_logits = []
        self._emit(event)

    def _emit(self, event: Event) -> None:
        try:
            self._on_event(event)
        except (
            Exception
        ):  # process edge: a caller's broken callback (a closed event loop, say) must not end the engine's thread
            log.exception("a request's callback raised; it is aborted")
            self.handle.abort()

    @property
    def usage(self) -> Usage:
        prompt = len(self.request.prompt)
        if self.plan is None:
            return Usage(prompt, 0, 0, 0, 0)
        native, converted = self.plan.count(Kind.NATIVE), self.plan.count(Kind.CONVERTED)
        return Usage(
            prompt,
            len(self.generated),
            native,
            converted,
            self.plan.computed_tokens,
            declined=self.plan.declined,
            shared=self.plan.shared,
            fused=self.fusing.tokens if self.fused and isinstance(self.fusing, SourceKV) else 0,
            bundles=self.plan.bundles,
            forced=self.forced,
            drafted=self.drafted,
            accepted=self.accepted,
            replayed=self.replayed,
            draft_native=self.draft_plan.count(Kind.NATIVE) if self.draft_plan else 0,
            draft_converted=self.draft_plan.count(Kind.CONVERTED) if self.draft_plan else 0,
        )
