"""Speculative decoding: a small draft model proposes tokens, the engine's own model checks several of them in one pass.

    loader thread   fetch     the draft's pages of the prompt: native, or converted ahead
    model thread    propose   what is missing: converted here from the large model's cache, else computed; then k tokens
                    verify    one pass of the large model over the last token and the k proposed ones

**Lossless.** Every token is chosen by `sampling.sample` from the *large* model's logits with the request's own random
numbers; a proposed token is only a guess of that choice, kept if it is right. So whatever the draft's cache holds, the answer
is that of plain decoding: a greedy or seeded request gives the same tokens with and without a draft, and without a seed the
distribution is the same because nothing else chooses.

One pass over several tokens rounds otherwise than one over each. Where that could change a choice (`engine.margin`), the
answer is computed again token by token from `exact_to` on, the end of what plain decoding would hold bit for bit, up to this
position: the choice is then plain decoding's own. Each token is computed again at most once, and each time shows how large
the noise is: the bound grows to twice the most that was seen.

Only a sequence that decodes alone is sped up: among others the linear layers are busy with the batch already, and plain
batched decoding goes on. The draft catches up when the sequence is alone again.
"""

from __future__ import annotations

import logging

from torch import Tensor

from moonpool.clock import Clock
from moonpool.engine.cache import SequenceKV
from moonpool.engine.draft import Draft, Drafting
from moonpool.engine.margin import NOISE, safe
from moonpool.engine.model import Runner
from moonpool.engine.sequence import RunningSequence

log = logging.getLogger(__name__)


class Speculation:
    """Decodes one sequence several tokens at a time. Owned by the model's thread."""

    def __init__(self, runner: Runner, draft: Draft, clock: Clock, *, noise: float | None = None) -> None:
        self._runner, self._draft, self._clock = runner, draft, clock
        self._noise = NOISE[runner.dtype] if noise is None else noise

    def fetch(self, seq: RunningSequence) -> None:
        """On the loader's thread, once per sequence."""
        try:
            seq.drafting = self._draft.fetch(seq)
        except Exception:  # process edge: a fault of the draft must not fail a request that needs no draft
            log.exception("the draft's prefix could not be read; the request goes on without a draft")

    def step(self, seq: RunningSequence) -> bool:
        """Guess, verify, accept at least one token. False: nothing was guessed, and nothing done."""
        state, kv = seq.drafting, seq.kv
        if state is None or kv is None:
            return False
        start = self._clock.now()
        guesses = self._draft.propose(seq, state)
        if not guesses:
            seq.timing.decode += self._clock.now() - start
            return False
        first = kv.length
        logits = self._runner.forward([kv], [[seq.generated[-1], *guesses]], keep=len(guesses) + 1)[0]
        kept = 0
        for i, row in enumerate(logits):
            kv.length = first + i + 1
            before = len(seq.generated)
            seq.accept(self._exact(seq, state, kv, row), self._clock.now())
            right = len(seq.generated) > before and seq.generated[-1:] == guesses[i : i + 1]
            kept += right
            if seq.finish_reason is not None or not right:
                break
        state.count = kept + 1
        seq.drafted += len(guesses)
        seq.accepted += kept
        seq.timing.decode += self._clock.now() - start
        return True

    def _exact(self, seq: RunningSequence, state: Drafting, kv: SequenceKV, row: Tensor) -> Tensor:
        """Logits of the last position of `kv` from which plain decoding's choice follows."""
        if safe(row, seq.request.sampling, seq.generator, self._noise):
            return row
        end, tokens, exact = kv.length, [*seq.request.prompt, *seq.generated], row
        kv.length = state.exact_to
        for token in tokens[kv.length : end]:
            exact = self._runner.forward([kv], [[token]], keep=1)[0, -1]
            seq.replayed += 1
        state.exact_to = end
        self._noise = max(self._noise, 2 * float((exact - row).abs().max()))
        return exact
