"""Judges a projector by what the target model says over the mapped cache, against controls (`arms`).

Protocol: a held-out document is cut into a prefix of whole pages and a continuation. The prefix's cache is filled by each arm;
the continuation is computed by the target itself over it, as an engine computes the uncached end of a prompt. Fact documents
(`facts`) ask the target for values that stand only in the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from moonpool.c2c.fitting.capture import KV, CaptureStore
from moonpool.c2c.fitting.facts import FactDocument, answer_nll, is_exact
from moonpool.c2c.fitting.features import rows
from moonpool.c2c.judging.arms import COMPARE, MAPPED, NATIVE, NO_CONTEXT, Case, Filled, Mapper, arms
from moonpool.c2c.judging.report import Arm, Protocol, Report, recovery
from moonpool.c2c.projectors.base import Projector
from moonpool.c2c.signature import ModelSpec
from moonpool.errors import ConfigError


class EvalOptions(msgspec.Struct, frozen=True, kw_only=True):
    prefix: int = 448
    continuation: int = 63
    page_size: int = 16
    seed: int = 0
    texts: tuple[str, ...] = ()
    """Names of the texts, for the report."""

    @property
    def document_tokens(self) -> int:
        """Length that a document must have: the last token is only predicted."""
        return self.prefix + self.continuation + 1


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
        both = {MAPPED: projector} | ({COMPARE: compare} if compare else {})
        self._mappers = {n: Mapper(p, source.spec, target.spec, options.page_size) for n, p in both.items()}
        self._tallies: dict[str, _Tally] = {}
        self._r2 = _R2(target.spec)
        self._documents = self._fact_documents = 0
        self._chances: list[float] = []

    def text(self, document: Tensor, other: Tensor) -> None:
        """Run every arm on one document; `other` lends the wrong context."""
        o = self._o
        if len(document) < o.document_tokens:
            raise ConfigError("document too short", need=f"{o.document_tokens} tokens", have=str(len(document)))
        said, follows = document[o.prefix : o.prefix + o.continuation], document[o.prefix + 1 : o.document_tokens]
        native = native_attention = None
        for arm in self._arms(document, other):
            with self._target.model.attention_outputs() as attention:
                logits = self._target.model.logits(arm.cache, said, start=arm.start).log_softmax(-1)
            if native is None or native_attention is None:
                native, native_attention = logits, list(attention)
            tally = self._tallies.setdefault(arm.name, _Tally())
            tally.nll.append(-logits.gather(1, follows[:, None])[:, 0])
            tally.kl.append((native.exp() * (native - logits)).sum(-1))
            tally.top1.append(logits.argmax(-1) == native.argmax(-1))
            tally.cosine.append(_cosines(native_attention, attention))
            if arm.name == MAPPED and arm.cache is not None:
                self._r2.add(arm.cache, self._target.get(document)[: o.prefix], o.page_size)
        self._documents += 1

    def facts(self, document: FactDocument) -> None:
        """Ask every arm the document's questions; its twin lends the wrong context."""
        model = self._target.model
        asked = [torch.cat([q.prompt, q.answer]) for q in document.questions]
        for arm in self._arms(document.tokens, document.twin):
            found = model.batch_logits(arm.cache, asked, start=arm.start)
            tally = self._tallies.setdefault(arm.name, _Tally())
            for logits, question in zip(found, document.questions, strict=True):
                tally.facts.append(is_exact(logits, question, self._decode))
                tally.answers.append(answer_nll(logits, question))
        self._fact_documents += 1
        self._chances += [1 / document.facts] * len(document.questions)

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
        )
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
        )


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
        attention_cosine=torch.stack(t.cosine).mean(0).tolist(),
    )


def _cosines(native: Sequence[Tensor], arm: Sequence[Tensor]) -> Tensor:
    """Mean cosine over tokens, one per layer."""
    return torch.stack([torch.cosine_similarity(a[0], b[0], dim=-1).mean() for a, b in zip(native, arm, strict=True)])


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
    evaluator: Evaluator, documents: Sequence[Tensor], facts: Sequence[FactDocument], console: Console
) -> Report:
    """Run all documents (each one's successor lends the wrong context) and sum up. Raises ConfigError for fewer than two."""
    if len(documents) < 2:
        raise ConfigError("two documents at least, so that one can lend the wrong context", have=str(len(documents)))
    for i in track(range(len(documents)), "documents", console=console, transient=True):
        evaluator.text(documents[i], documents[(i + 1) % len(documents)])
    for document in track(facts, "facts", console=console, transient=True):
        evaluator.facts(document)
    return evaluator.report()
