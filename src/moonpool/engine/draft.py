"""The draft's side of speculative decoding: a small model that guesses what the engine's own model will choose.

Its cache of the prompt is taken, page by page, from the first of these that there is: its own page in the pool; a page
converted ahead, in the pool; a conversion here and now of the *large* model's cache of this very request; its own prefill.
Page 0 and the last full page are never converted (`engine.plan`). No answer depends on any of it (`engine.speculative`), so
the gate has no say here: a poor bundle costs time, never quality. Nothing of the draft's is stored.

A guess is drawn from the draft's logits with the very random number that the large model's token will be drawn with: where the
two distributions are alike, so are the tokens.

Between two tokens of the answer the draft converts or computes about one chunk of its prompt; until all is there, plain
decoding goes on. So a long prompt delays others no longer than a chunk of prefill does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from msgspec.structs import replace
from torch import Tensor

from moonpool.c2c.config import C2CConfig, Rule
from moonpool.c2c.convert import Conversion
from moonpool.c2c.loading import load_conversion
from moonpool.c2c.signature import Difference, ModelSpec, check_contract
from moonpool.clock import Clock
from moonpool.engine.cache import SequenceKV
from moonpool.engine.model import Compute, Runner
from moonpool.engine.plan import Kind, Load, plan_prefix
from moonpool.engine.prefix import PrefixLoader
from moonpool.engine.sampling import SamplingParams, copied, sample
from moonpool.engine.sequence import RunningSequence
from moonpool.errors import ConfigError, MoonpoolError
from moonpool.store.base import KVPool

log = logging.getLogger(__name__)

MAX_TOKENS = 16

DraftKV = Literal["converted", "native"]
"""What the draft's cache of a prompt may be made of: `native` leaves all conversion out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """Which model drafts, and how many tokens at a time."""

    ref: str
    spec: ModelSpec
    tokens: int = 4
    kv: DraftKV = "converted"

    def check(self, target: ModelSpec) -> None:
        """Raises ConfigError, or ConversionRefused where the two models do not mean the same by a token."""
        if not 1 <= self.tokens <= MAX_TOKENS:
            raise ConfigError("draft.tokens out of range", need=f"1..{MAX_TOKENS}", have=str(self.tokens))
        mine, theirs = self.spec.tokenizer, target.tokenizer
        found = [] if mine == theirs else [Difference("tokenizer", theirs, mine)]
        check_contract(f"{self.spec.name} drafts for {target.name}", found)


@dataclass(slots=True)
class Drafting:
    """The draft's side of one sequence. Owned by the loader's thread, then by the model's."""

    kv: SequenceKV
    found: list[Kind | None]
    """Per page of the prompt: what is in `kv` already."""
    count: int
    """So many tokens to guess next: one more than were right the last time."""
    exact_to: int
    """So many tokens of the large model's cache are those of plain decoding, bit for bit."""
    work: Iterator[int] | None = None
    """What is left to do for the prompt's cache, in steps of so many tokens. None before the first step."""
    failed: bool = False


class Draft:
    """Proposes tokens for one model. `fetch` is for the loader's thread, all else for the model's."""

    def __init__(
        self,
        model: DraftModel,
        target: ModelSpec,
        pool: KVPool | None,
        *,
        page_size: int,
        chunk: int,
        clock: Clock,
        c2c: C2CConfig | None = None,
        load_rule: Callable[[Rule], Conversion] | None = None,
        compute: Compute = "auto",
        device: str = "cpu",
    ) -> None:
        """Loads the draft, and the bundle of the rule from `target` to it if `c2c` has one; a bundle that cannot be loaded is
        no error. Raises ModelError, ConfigError, ConversionRefused for a draft that cannot serve."""
        model.check(target)
        c2c = c2c if model.kv == "converted" else None
        self._clock = clock
        self._spec, self._target, self._tokens, self._chunk = model.spec, target, model.tokens, chunk
        self._page_size = page_size
        self._runner = Runner(model.ref, model.spec, page_size=page_size, compute=compute, device=device)
        owner = model.spec.identity(page_size).digest()
        self._loader = (
            PrefixLoader(pool, self._runner.shape, lambda wish: c2c.origins(owner, wish) if c2c else (), clock=clock)
            if pool
            else None
        )
        self._conversion = _conversion(target, model.spec, c2c, load_rule, page_size) if c2c else None

    def fetch(self, seq: RunningSequence) -> Drafting | None:
        """Read what the pool has of the draft's prefix. None: this request is not sped up."""
        tokens = seq.request.prompt
        fits = len(tokens) < self._spec.max_positions and max(tokens) < self._spec.vocab_size
        if not fits or not seq.request.speculate or seq.request.max_tokens < 3:
            return None
        kv = self._runner.new_sequence(len(tokens) + self._tokens)
        found: list[Kind | None] = [None] * (len(tokens) // self._page_size)
        if self._loader:
            keys = self._spec.identity(self._page_size, salt=seq.request.salt).page_keys(tokens)
            plan = self._loader.load(kv, self._loader.lookup(keys, None, tokens), len(tokens), 1)
            for i, kind in plan.loaded_pages:
                found[i] = kind
        return Drafting(kv, found, count=self._tokens, exact_to=len(tokens))

    def propose(self, seq: RunningSequence, state: Drafting) -> list[int]:
        """Guesses of what comes next; none where too little of the answer is left, the draft's cache of the prompt is not
        complete yet, or the draft failed."""
        assert seq.kv is not None
        room = min(seq.request.max_tokens - len(seq.generated), self._spec.max_positions - seq.kv.length - 1) - 1
        count = min(self._tokens, state.count, room)
        if count < 1 or state.failed:
            return []
        try:
            return self._guess(seq, seq.kv, state, count)
        except Exception:  # process edge: a fault of the draft must not fail a request that needs no draft
            log.exception("drafting failed; the request goes on without it")
            state.failed = True
            return []

    def _guess(self, seq: RunningSequence, target: SequenceKV, state: Drafting, count: int) -> list[int]:
        tokens = [*seq.request.prompt, *seq.generated]
        if max(tokens[-self._tokens - 1 :]) >= self._spec.vocab_size:
            return []
        if not self._ready(seq, target, state):
            return []
        kv = state.kv
        kv.length = min(kv.length, len(tokens) - 1)  # behind the last token that was kept lie refused guesses
        behind = tokens[kv.length :]  # many, if the sequence decoded among others for a while
        logits = self._runner.forward([kv], [behind[: self._chunk]], keep=1)
        if len(behind) > self._chunk:
            return []
        numbers = copied(seq.generator)
        guesses = [self._choice(logits, seq.request.sampling, numbers)]
        while len(guesses) < count:
            logits = self._runner.forward([kv], [guesses[-1:]], keep=1)
            guesses.append(self._choice(logits, seq.request.sampling, numbers))
        return guesses

    def _ready(self, seq: RunningSequence, target: SequenceKV, state: Drafting) -> bool:
        """Whether the draft's cache of the prompt is complete, after a chunk's worth of work on it."""
        if state.work is None:
            state.work = self._complete(seq, target, state)
        start, done, complete = self._clock.now(), 0, False
        while done < self._chunk and not complete:
            step = next(state.work, None)
            done, complete = done + (step or 0), step is None
        seq.timing.draft += self._clock.now() - start
        return complete

    def _choice(self, logits: Tensor, params: SamplingParams, numbers: torch.Generator) -> int:
        return sample(logits[0, -1, : self._target.vocab_size], params, numbers)

    def _complete(self, seq: RunningSequence, target: SequenceKV, state: Drafting) -> Iterator[int]:
        """Make the draft's cache of the prompt, but for the last token. Yields how many tokens each step made."""
        prompt, kv = seq.request.prompt, state.kv
        if self._conversion:
            yield from self._convert(self._conversion, target, state, len(prompt) // self._page_size - 1)
        seq.draft_plan = plan_prefix(len(prompt), self._page_size, state.found)
        for step in seq.draft_plan.steps:
            if isinstance(step, Load):
                kv.length = step.end * self._page_size
                continue
            end = min(step.end, len(prompt) - 1)
            while kv.length < end:
                some = prompt[kv.length : min(end, kv.length + self._chunk)]
                self._runner.forward([kv], [some], keep=0)
                yield len(some)

    @torch.inference_mode()
    def _convert_pages(self, conversion: Conversion, target: SequenceKV, pages: list[int]) -> Tensor:
        size = self._page_size
        rows = torch.cat([torch.arange(i * size, (i + 1) * size) for i in pages])
        k, v = (half[rows.to(half.device)].float().cpu() for half in target.tokens(0, target.length))
        return conversion.project_kv(k, v, rows).bfloat16()

    def _convert(self, conversion: Conversion, target: SequenceKV, state: Drafting, end: int) -> Iterator[int]:
        """Pages `[1, end)` that the pool did not have, from the large model's cache. What is not finite is left out."""
        missing, size = [i for i in range(1, end) if state.found[i] is None], self._page_size
        for at in range(0, len(missing), _PAGES_AT_ONCE):
            some = missing[at : at + _PAGES_AT_ONCE]
            made = self._convert_pages(conversion, target, some)
            for n, i in enumerate(some):
                page = made[n * size : (n + 1) * size]
                if bool(page.isfinite().all()):
                    state.kv.write(i * size, page[:, :, 0], page[:, :, 1])
                    state.found[i] = Kind.CONVERTED
            yield len(some) * size


_PAGES_AT_ONCE = 64
"""Bounds the fp32 intermediates of a conversion."""


def _conversion(
    source: ModelSpec, draft: ModelSpec, c2c: C2CConfig, load: Callable[[Rule], Conversion] | None, page_size: int
) -> Conversion | None:
    """Of the first rule from `source` to `draft`. The gate is not asked, for no answer depends on it."""
    ends = source.identity(page_size).digest(), draft.identity(page_size).digest()
    rule = next((r for r in c2c.rules if (r.source.owner, r.target.owner) == ends), None)
    if rule is None:
        return None
    try:
        return (load or (lambda r: load_conversion(r, c2c)))(replace(rule, force=True))
    except MoonpoolError as e:
        log.warning("rule %s: the draft %s computes its prompts: %s", rule.name, draft.name, e)
        return None
