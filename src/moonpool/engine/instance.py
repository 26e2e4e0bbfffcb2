"""One model, one pool, one scheduler: the instance that a server or a program talks to."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self

import torch
from transformers import AutoTokenizer

from moonpool.c2c.calibration import rule_cost
from moonpool.c2c.config import C2CConfig, Rule
from moonpool.c2c.loading import load_conversion
from moonpool.c2c.signature import ModelSpec
from moonpool.clock import Clock, SystemClock
from moonpool.engine.alias import Aliases
from moonpool.engine.draft import Draft, DraftModel
from moonpool.engine.fuse import Fusion, LoadFuser, load_fuser
from moonpool.engine.model import Compute, Runner
from moonpool.engine.onload import LoadRule, OnLoad
from moonpool.engine.pays import Payoff
from moonpool.engine.prefix import Origins, PrefixLoader
from moonpool.engine.publish import Publisher
from moonpool.engine.request import Event, GenerateRequest, GenerateResult, Handle, OnEvent, Piece
from moonpool.engine.rules import EngineRules
from moonpool.engine.scheduler import Limits, Scheduler
from moonpool.engine.sequence import RunningSequence
from moonpool.engine.shadow import Histogram, ShadowChecks
from moonpool.engine.speculative import Speculation
from moonpool.engine.stats import EngineStats
from moonpool.errors import DeadlineExceeded, ModelError, MoonpoolError, RequestError
from moonpool.store.base import KVPool
from moonpool.types import RuleStatus

log = logging.getLogger(__name__)

_GRACE_S = 30.0
"""A caller waits so much longer than the request's own deadline before it gives the engine up."""


class Instance:
    """Serves one model. Safe to use from several threads; `close` twice is safe and leaves no thread.

    `origins` says which bundles' pages this model may take: a fixed list of digests, or a function of the request's own wish
    (`C2CConfig.origins`). Of the rules in `c2c` those for this model are asked whether a converted prefix pays, and those of
    modes `on_load` and `fuse` are run here; `load_rule` and `load_fuse_rule` make their conversions (default: fetch, verify and
    check the bundle). A `draft` guesses tokens ahead, which changes no answer (`engine.speculative`).
    Without a pool nothing is loaded or stored. The pool is not closed: whoever opened it does.
    Raises ModelError if model or tokenizer cannot be loaded, ConfigError for limits that make no sense.
    """

    def __init__(
        self,
        model: str | Path,
        spec: ModelSpec,
        pool: KVPool | None,
        *,
        page_size: int = 16,
        origins: Origins | Sequence[str] = (),
        c2c: C2CConfig | None = None,
        load_rule: LoadRule | None = None,
        load_fuse_rule: LoadFuser | None = None,
        draft: DraftModel | None = None,
        limits: Limits | None = None,
        compute: Compute = "auto",
        device: str = "cpu",
        clock: Clock | None = None,
    ) -> None:
        self.spec, self.page_size = spec, page_size
        self._clock = clock or SystemClock()
        limits = limits or Limits()
        limits.check(page_size)
        self._tokenizer = _load_tokenizer(str(model))
        self._encoding = threading.Lock()
        self._runner = Runner(str(model), spec, page_size=page_size, compute=compute, device=device)
        self._eos = self._runner.eos
        shape = self._runner.shape
        self._on_load = _on_load(pool, spec, c2c, load_rule, self._clock) if pool and c2c else None
        self._fusion = _fusion(pool, spec, c2c, load_fuse_rule, self._runner.device) if pool and c2c else None
        self._rules = _rules(pool, spec, c2c, self._on_load, self._clock) if pool and c2c else None
        payoff = _payoff(spec, c2c, self._runner.device.type) if c2c else None
        loader = (
            PrefixLoader(
                pool,
                shape,
                _origins(origins, self._rules),
                aliases=_aliases(pool, spec, c2c) if c2c else None,
                on_load=self._on_load,
                payoff=payoff,
                clock=self._clock,
            )
            if pool
            else None
        )
        self._publisher = Publisher(pool, shape, self._clock, depth=limits.store_queue) if pool else None
        self._shadow = ShadowChecks(self._runner, self._rules, limits.prefill_chunk, Random()) if self._rules else None
        speculation = None
        if draft:
            guesser = Draft(
                draft,
                spec,
                pool,
                page_size=page_size,
                chunk=limits.prefill_chunk,
                clock=self._clock,
                c2c=c2c,
                load_rule=load_rule,
                compute=compute,
                device=device,
            )
            speculation = Speculation(self._runner, guesser, self._clock)
        self._scheduler = Scheduler(
            self._runner,
            loader,
            self._publisher,
            limits,
            self._clock,
            fusion=self._fusion,
            rules=self._rules,
            shadow=self._shadow,
            speculation=speculation,
        )

    # -- text

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the special tokens that this tokenizer puts around it."""
        with self._encoding:
            return [int(t) for t in self._tokenizer.encode(text)]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant begins to speak. Raises RequestError if the model has no
        chat template or the template refuses these messages."""
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise RequestError("this model has no chat template", fix="Use /v1/completions.")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError) as e:
            raise RequestError(f"the chat template refuses these messages: {e}") from e
        with self._encoding:
            return [int(t) for t in self._tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    # -- generation

    def submit(self, request: GenerateRequest, on_event: OnEvent) -> Handle:
        """Start a request. `on_event` gets pieces, then one result or error, from the engine's threads.

        Raises RequestError, ContextTooLong, QueueFull, EngineClosed; then no event comes.
        """
        request.validate(max_positions=self.spec.max_positions, vocab_size=self.spec.vocab_size)
        seq = RunningSequence(
            request,
            on_event,
            identity=self.spec.identity(self.page_size, salt=request.salt),
            decode=self.decode,
            eos=self._eos,
            now=self._clock.now(),
        )
        self._scheduler.submit(seq)
        return seq.handle

    def stream(self, request: GenerateRequest) -> Iterator[Piece | GenerateResult]:
        """Pieces of text, then the result. Leaving the loop early aborts the request. Raises what `submit` does, at once,
        and what became of the request."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        return self._drain(self.submit(request, events.put), events, request.deadline_s + _GRACE_S)

    def _drain(
        self, handle: Handle, events: queue.SimpleQueue[Event], timeout: float
    ) -> Iterator[Piece | GenerateResult]:
        try:
            while True:
                try:
                    event = events.get(timeout=timeout)
                except queue.Empty:
                    raise DeadlineExceeded("the engine does not answer", need=f"an event in {timeout:g} s") from None
                if isinstance(event, MoonpoolError):
                    raise event
                yield event
                if isinstance(event, GenerateResult):
                    return
        finally:
            handle.abort()

    def generate(self, request: GenerateRequest) -> GenerateResult:
        """Run a request to its end. Raises what `stream` does."""
        for event in self.stream(request):
            if isinstance(event, GenerateResult):
                return event
        raise AssertionError("a stream ends with a result or an error")

    # -- the rest

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until every page computed so far is stored (or refused); False after `timeout` seconds."""
        return self._publisher.flush(timeout) if self._publisher else True

    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def rules(self) -> list[RuleStatus]:
        """What this engine has to say of each conversion rule of its model."""
        return self._rules.statuses() if self._rules else []

    def forced_rules(self) -> tuple[str, ...]:
        """Bundle digests of those that are served although the gate refused them."""
        return self._rules.forced([r.digest for r in self.rules()]) if self._rules else ()

    def disabled_rules(self) -> Mapping[str, str]:
        """Bundle digest → why nothing is taken of it, of those that are disabled."""
        return self._rules.disabled() if self._rules else {}

    def shadow_histogram(self) -> Histogram | None:
        """KLs of the shadow checks so far; None where none can be."""
        return self._shadow.histogram() if self._shadow else None

    def wait_ready(self, timeout: float) -> bool:
        """Wait until the bundles of `on_load` and `fuse` rules are loaded or refused; False after `timeout` seconds (for each of
        the two). Requests need not wait: until then these rules serve nothing."""
        return all(part is None or part.wait_ready(timeout) for part in (self._on_load, self._fusion))

    def refusals(self) -> dict[str, str]:
        """Rules of modes `on_load` and `fuse` that this engine does not serve, by name, and why."""
        found = dict(self._on_load.refusals) if self._on_load else {}
        return found | self._fusion.refusals() if self._fusion else found

    @property
    def closed(self) -> bool:
        return self._scheduler.closing

    def close(self, timeout: float = 10.0) -> None:
        """Fail what runs, store what was computed (for at most `timeout` seconds), end the threads."""
        self._scheduler.close(timeout)
        for part in (self._on_load, self._fusion):
            if part:
                part.close(timeout)
        if self._publisher:
            self._publisher.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _origins(given: Origins | Sequence[str], rules: EngineRules | None) -> Origins:
    """As given, less those of rules that are not served now."""
    fixed: tuple[str, ...] = () if callable(given) else tuple(given)

    def wanted(wish: bool | None) -> Sequence[str]:
        if callable(given):
            return given(wish)
        return () if wish is False else fixed

    return (lambda wish: rules.allowed(wanted(wish))) if rules else wanted


def _rules(pool: KVPool, spec: ModelSpec, c2c: C2CConfig, on_load: OnLoad | None, clock: Clock) -> EngineRules | None:
    mine = _rules_for(spec, c2c)
    return EngineRules(pool, mine, clock, on_load.status if on_load else lambda _: None) if mine else None


def _on_load(pool: KVPool, spec: ModelSpec, c2c: C2CConfig, load: LoadRule | None, clock: Clock) -> OnLoad | None:
    rules = [r for r in _rules_for(spec, c2c) if r.mode == "on_load"]
    make = load or (lambda rule: load_conversion(rule, c2c))
    return OnLoad(pool, rules, make, clock, batch_pages=c2c.batch_pages).start() if rules else None


def _aliases(pool: KVPool, spec: ModelSpec, c2c: C2CConfig) -> Aliases | None:
    owner = spec.identity(c2c.page_size).digest()
    mine = [a for a in c2c.aliases if a.target.owner == owner]
    return Aliases(pool, mine, c2c.page_size) if mine else None


def _fusion(
    pool: KVPool, spec: ModelSpec, c2c: C2CConfig, load: LoadFuser | None, device: torch.device
) -> Fusion | None:
    owner = spec.identity(c2c.page_size).digest()
    rule = next((r for r in c2c.fusions if r.target.owner == owner), None)
    make = load or (lambda rule: load_fuser(rule, c2c))
    return Fusion(pool, rule, make, page_size=c2c.page_size, device=device).start() if rule else None


def _payoff(spec: ModelSpec, c2c: C2CConfig, device: str) -> Payoff | None:
    costs = {r.digest: cost for r in _rules_for(spec, c2c) if (cost := rule_cost(r, device=device)) is not None}
    return Payoff(costs, c2c.page_size) if costs else None


def _rules_for(spec: ModelSpec, c2c: C2CConfig) -> list[Rule]:
    owner = spec.identity(c2c.page_size).digest()
    return [r for r in c2c.rules if r.target.owner == owner]


def _load_tokenizer(ref: str) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(ref)
        # The first encode resets truncation and padding inside the Rust tokenizer, which fails ("Already borrowed") while
        # another thread decodes. Done once here, it never changes again.
        tokenizer.encode("a")
        return tokenizer
    except (OSError, ValueError) as e:
        raise ModelError(f"cannot load the tokenizer: {e}", key=ref) from e
