"""Judges a projector by what the target model says over the mapped cache, against controls (`arms`).

Protocol: a held-out document is cut into a prefix of whole pages and a continuation. The prefix's cache is filled by each arm;
the continuation is computed by the target itself over it, as an engine computes the uncached end of a prompt. Fact documents
(`facts`) ask the target for values that stand only in the prefix. What takes many passes (`checks`) is done on a few documents.

Memory: both models (the source answers too), and the KV of two documents in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from moonpool.c2c.cost import prefill_flops
from moonpool.c2c.fitting.capture import KV, CaptureStore, CausalModel, concat
from moonpool.c2c.fitting.facts import FactDocument, answer_nll, is_exact
from moonpool.c2c.fitting.features import rows
from moonpool.c2c.judging import checks
from moonpool.c2c.judging.arms import COMPARE, MAPPED, NATIVE, NO_CONTEXT, SOURCE, Case, Filled, Mapper, arms
from moonpool.c2c.judging.report import Arm, Kind, Protocol, Report, Span, recovery
from moonpool.c2c.projectors.base import Projector
from moonpool.c2c.signature import ModelSpec
from moonpool.errors import ConfigError

LONG = 4
"""The long check's prefix, as a multiple of the others'."""
PREFILL_CONTEXT = 1024
"""Tokens of the prompt that a projector's cost is held against."""


class EvalOptions(msgspec.Struct, frozen=True, kw_only=True):
    prefix: int = 448
    continuation: int = 63
    page_size: int = 16
    seed: int = 0
    texts: tuple[str, ...] = ()
    """Names of the texts, for the report."""
    kind: Kind = "text"
    fact_form: str = "lines"
    """Form of the fact documents, for the report."""
    checks: int = 4
    """Documents that each costly measure is taken on; 0 = none."""
    generate: int = 32
    """Tokens of a greedy answer."""

    @property
    def document_tokens(self) -> int:
        """Length that a document must have: the last token is only predicted."""
        return self.prefix + self.continuation + 1

    @property
    def long_prefix(self) -> int:
        return LONG * self.prefix

    @property
    def long_tokens(self) -> int:
        """Length of a document of the check at a multiple of the prefix."""
        return self.long_prefix + self.continuation + 1


@dataclass(slots=True)
class _Tally:
    """Per-token measures of one arm."""

    nll: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    top1: list[Tensor] = field(default_factory=list)
    cosine: list[Tensor] = field(default_factory=list)
    facts: list[bool] = field(default_factory=list)
    answers: list[Tensor] = field(default_factory=list)


class Evaluator:
    """Runs the arms over documents; `report` sums up."""

    def __init__(
        self,
        source: CaptureStore,
        target: CaptureStore,
        projector: Projector,
        options: EvalOptions,
        compare: Projector | None = None,
    ) -> None:
        """Raises ConfigError if prefix and pages do not fit, ConversionRefused if projector and models do not."""
        if options.prefix % options.page_size or options.prefix < 2 * options.page_size:
            raise ConfigError(
                "the prefix must be whole pages, two at least", have=f"{options.prefix} / {options.page_size}"
            )
        self._source, self._target, self._o = source, target, options
        self.options = options
        both = {MAPPED: projector} | ({COMPARE: compare} if compare else {})
        self._mappers = {n: Mapper(p, source.spec, target.spec, options.page_size) for n, p in both.items()}
        self._flops = {n: p.flops_per_token() for n, p in both.items()}
        self._tallies: dict[str, _Tally] = {}
        self._r2 = _R2(target.spec)
        self._documents = self._fact_documents = 0
        self._chances: list[float] = []
        self._points: dict[int, list[checks.Point]] = {}
        self._turns: list[list[Tensor]] = []
        self._generated: list[float] = []

    def text(self, document: Tensor, other: Tensor) -> None:
        """Run every arm on one document; `other` lends the wrong context."""
        o = self._o
        if len(document) < o.document_tokens:
            raise ConfigError("document too short", need=f"{o.document_tokens} tokens", have=str(len(document)))
        said, follows = document[o.prefix : o.prefix + o.continuation], document[o.prefix + 1 : o.document_tokens]
        native = native_attention = None
        for arm in self._arms(document, other):
            model, tail = self._speaker(arm), document[o.prefix - arm.tail : o.prefix]
            with model.attention_outputs() as attention:
                logits = model.logits(arm.cache, torch.cat([tail, said]), start=arm.start - arm.tail)[arm.tail :]
            if native is None or native_attention is None:
                native, native_attention = logits, list(attention)
            tally = self._tallies.setdefault(arm.name, _Tally())
            tally.nll.append(checks.nll(logits, follows))
            tally.kl.append(checks.kl(native, logits))
            tally.top1.append(checks.same(native, logits))
            if arm.name != SOURCE:  # its layers are other ones
                tally.cosine.append(_cosines(native_attention, attention, arm.tail))
            if arm.name == MAPPED and arm.cache is not None:
                self._r2.add(arm.cache, self._target.get(document)[: o.prefix], o.page_size)
        self._documents += 1

    def facts(self, document: FactDocument) -> None:
        """Ask every arm the document's questions; its twin lends the wrong context."""
        end = self._o.prefix
        for arm in self._arms(document.tokens, document.twin):
            tail = document.tokens[end - arm.tail : end]
            asked = [torch.cat([tail, q.prompt, q.answer]) for q in document.questions]
            found = self._speaker(arm).batch_logits(arm.cache, asked, start=arm.start - arm.tail)
            tally = self._tallies.setdefault(arm.name, _Tally())
            for all_logits, question in zip(found, document.questions, strict=True):
                logits = all_logits[arm.tail :]
                tally.facts.append(is_exact(logits, question, self._decode))
                tally.answers.append(answer_nll(logits, question))
        self._fact_documents += 1
        self._chances += [1 / document.facts] * len(document.questions)

    def check(self, document: Tensor) -> None:
        """Take the costly measures on a document: quality by length, drift over turns, greedy answers."""
        o, model, caches = self._o, self._target.model, self._caches(document, self._o.prefix)
        for tokens in checks.lengths(o.prefix, o.page_size):
            self._points.setdefault(tokens, []).append(checks.at_length(model, caches, tokens, o.continuation))
        self._turns.append(checks.turns(model, caches, o.page_size))
        self._generated.append(checks.generated(model, caches, o.prefix, o.generate))

    def long(self, document: Tensor) -> None:
        """Judge behind a prefix of `long_prefix` tokens; the document has `long_tokens`."""
        o, prefix = self._o, self._o.long_prefix
        caches = self._caches(document, prefix)
        point = checks.at_length(self._target.model, caches, prefix, o.continuation)
        self._points.setdefault(prefix, []).append(point)

    def _caches(self, document: Tensor, prefix: int) -> checks.Caches:
        native, source = (store.get(document)[:prefix] for store in (self._target, self._source))
        first = self._o.page_size
        mapped = concat([native[:first], self._mappers[MAPPED].map(source)[first:]])
        return checks.Caches(document, native, mapped)

    def _speaker(self, arm: Filled) -> CausalModel:
        return (self._source if arm.name == SOURCE else self._target).model

    def _decode(self, token: int) -> str:
        return str(self._target.model.tokenizer.decode([token]))

    def _arms(self, document: Tensor, other: Tensor) -> list[Filled]:
        cut = slice(0, self._o.prefix)
        case = Case(*(store.get(d)[cut] for d in (document, other) for store in (self._target, self._source)))
        return list(arms(case, self._mappers, self._o.page_size, self._o.seed))

    def report(self) -> Report:
        """Raises ConfigError if no document was run."""
        if not self._documents:
            raise ConfigError("no held-out document was run", fix="Give more --text files.")
        o, r2 = self._o, self._r2.values()
        protocol = Protocol(
            prefix_tokens=o.prefix,
            continuation_tokens=o.continuation,
            page_size=o.page_size,
            documents=self._documents,
            fact_documents=self._fact_documents,
            fact_questions=len(self._chances),
            fact_chance=sum(self._chances) / max(1, len(self._chances)),
            texts=list(o.texts),
            compute=str(self._target.dtype).removeprefix("torch."),
            fact_form=o.fact_form,
            length_documents=len(self._turns),
            long_documents=len(self._points.get(o.long_prefix, [])),
            turn_documents=len(self._turns),
            generated_documents=len(self._generated),
            generated_tokens=o.generate if self._generated else 0,
        )
        points = {tokens: checks.length_check(found) for tokens, found in sorted(self._points.items())}
        ends = self._tallies[NATIVE], self._tallies[NO_CONTEXT]
        return Report(
            source=self._source.spec.name,
            source_revision=self._source.spec.revision,
            target=self._target.spec.name,
            target_revision=self._target.spec.revision,
            projector=" | ".join(f"{n}: {m.kind}" for n, m in self._mappers.items()),
            protocol=protocol,
            arms=[_arm(name, tally, ends) for name, tally in self._tallies.items() if tally.nll],
            r2_k=r2[0],
            r2_v=r2[1],
            kind=o.kind,
            flops_per_token=self._flops[MAPPED],
            compare_flops_per_token=self._flops.get(COMPARE, 0),
            prefill_flops_per_token=prefill_flops(self._target.spec, PREFILL_CONTEXT),
            by_position=_spans(self._tallies[MAPPED]),
            by_length=[c for tokens, c in points.items() if tokens != o.long_prefix],
            long=points.get(o.long_prefix),
            turns=[_mean(turn) for turn in zip(*self._turns, strict=True)],
            generation_retention=_share(self._generated),
            generation_same=_share([float(share == 1) for share in self._generated]),
        )


def _spans(t: _Tally) -> list[Span]:
    """Measures by distance from the prefix: token 0, then spans that double. Continuations have one length."""
    kl, top1 = (torch.stack(x).double().mean(0) for x in (t.kl, t.top1))
    starts = [0, *(1 << i for i in range(len(kl).bit_length()) if 1 << i < len(kl))]
    return [
        Span(start=a, end=b, kl_mean=float(kl[a:b].mean()), top1=float(top1[a:b].mean()))
        for a, b in zip(starts, [*starts[1:], len(kl)], strict=True)
    ]


def _share(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _mean(values: Sequence[Tensor]) -> float:
    return float(torch.cat(list(values)).double().mean())


def _arm(name: str, t: _Tally, ends: tuple[_Tally, _Tally]) -> Arm:
    native, none = ends
    kl, top1 = (torch.cat(x).double() for x in (t.kl, t.top1))
    nll = _mean(t.nll)
    answers = _mean(t.answers) if t.answers else None
    return Arm(
        name=name,
        nll=nll,
        kl_mean=float(kl.mean()),
        kl_p95=float(kl.quantile(0.95)),
        top1=float(top1.mean()),
        recovery=recovery(_mean(native.nll), _mean(none.nll), nll),
        facts=sum(t.facts) / len(t.facts) if t.facts else None,
        answer_nll=answers,
        answer_recovery=None if answers is None else recovery(_mean(native.answers), _mean(none.answers), answers),
        attention_cosine=torch.stack(t.cosine).mean(0).tolist() if t.cosine else [],
    )


def _cosines(native: Sequence[Tensor], arm: Sequence[Tensor], tail: int) -> Tensor:
    """Mean cosine over the continuation's tokens, one per layer."""
    both = zip(native, arm, strict=True)
    return torch.stack([torch.cosine_similarity(a[0], b[0, tail:], dim=-1).mean() for a, b in both])


class _R2:
    """Explained variance of mapped keys (content) and values, per target layer, over all documents."""

    def __init__(self, spec: ModelSpec) -> None:
        self._rope, shape = spec.rope, (spec.num_layers, 2, spec.num_kv_heads * spec.head_dim)
        self._count = 0
        self._sum, self._squares, self._errors = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))

    def add(self, mapped: KV, native: KV, page_size: int) -> None:
        y, found = (rows(kv, self._rope)[page_size:].double() for kv in (native, mapped))
        self._count += len(y)
        self._sum += y.sum(0)
        self._squares += y.square().sum(0)
        self._errors += (y - found).square().sum(0)

    def values(self) -> tuple[list[float], list[float]]:
        total = (self._squares - self._sum.square() / max(1, self._count)).sum(-1)
        r2 = 1 - self._errors.sum(-1) / total.clamp(min=1e-12)
        return r2[:, 0].tolist(), r2[:, 1].tolist()


def evaluate(
    evaluator: Evaluator,
    documents: Sequence[Tensor],
    facts: Sequence[FactDocument],
    console: Console,
    long: Sequence[Tensor] = (),
) -> Report:
    """Run all documents (each one's successor lends the wrong context) and sum up. The costly measures are taken on the first
    documents, and the first of `long` (`EvalOptions.long_tokens` each). Raises ConfigError for fewer than two documents."""
    few = evaluator.options.checks
    if len(documents) < 2:
        raise ConfigError("two documents at least, so that one can lend the wrong context", have=str(len(documents)))
    for i in track(range(len(documents)), "documents", console=console, transient=True):
        evaluator.text(documents[i], documents[(i + 1) % len(documents)])
    for asked in track(facts, "facts", console=console, transient=True):
        evaluator.facts(asked)
    for document in track(documents[:few], "lengths, turns, answers", console=console, transient=True):
        evaluator.check(document)
    for document in track(long[:few], "long", console=console, transient=True):
        evaluator.long(document)
    return evaluator.report()
