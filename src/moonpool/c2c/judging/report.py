"""What the evaluator found, as data (`report.json`) and to read (Markdown, rich table)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from rich.table import Table

from moonpool.c2c.bundle import WEIGHTS, Bundle
from moonpool.errors import BundleCorrupt

Kind = Literal["text", "code", "prose", "chat"]

FORMAT = 1
MIN_GAIN = 0.05
"""Nats per token that the context must be worth, or recovery is a quotient of noise."""
_MAX_BYTES = 16 << 20


class Arm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to fill the target's cache, and what the target then says."""

    name: str
    nll: float
    """Mean negative log-likelihood of the continuation, nats per token."""
    kl_mean: float
    """KL(native ‖ this arm) of the next-token distribution, nats, mean over tokens."""
    kl_p95: float
    top1: float
    """Share of tokens whose most likely next token is the native one."""
    recovery: float | None
    """(NLL without context − NLL of this arm) / (NLL without context − native NLL): 1 = native, 0 = as if without context. None
    where the context is worth less than `MIN_GAIN` to the native model, so that there is nothing to recover."""
    facts: float | None = None
    """Share of context-only questions that greedy decoding answers with the document's value."""
    answer_nll: float | None = None
    """Negative log-likelihood of the right answers to these questions, nats per token."""
    answer_recovery: float | None = None
    """`recovery` of that."""
    attention_cosine: list[float] = []
    """Per layer: cosine of the attention output with the native run's, mean over tokens (errors of the layers below included)."""


class Protocol(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the arms were run."""

    prefix_tokens: int
    continuation_tokens: int
    page_size: int
    documents: int
    fact_documents: int = 0
    fact_questions: int = 0
    fact_chance: float = 0.0
    """Chance of a guess among the values that stand in the document."""
    first_page: str = "native in every arm but no_context"
    no_context: str = "continuation alone, from position 0"
    texts: list[str] = []
    compute: str = "float32"
    """What both models computed in."""
    fact_form: str = "lines"
    """How facts are told and asked for (`fitting.facts_forms`)."""
    length_documents: int = 0
    """Documents of `by_length`; likewise below."""
    long_documents: int = 0
    turn_documents: int = 0
    generated_documents: int = 0
    generated_tokens: int = 0
    """Most tokens of an answer of `generation_retention`."""


class Span(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `mapped` arm on tokens `[start, end)` of the continuation, counted from the end of the prefix."""

    start: int
    end: int
    kl_mean: float
    top1: float

    @property
    def label(self) -> str:
        return str(self.start) if self.end - self.start == 1 else f"{self.start}–{self.end - 1}"


class LengthCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `mapped` arm behind a prefix of this length, on the tokens that follow it."""

    tokens: int
    documents: int
    kl_mean: float
    top1: float
    recovery: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int = FORMAT
    source: str
    source_revision: str
    target: str
    target_revision: str
    projector: str
    """Kind of the projector that the `mapped` arm uses."""
    protocol: Protocol
    arms: list[Arm]
    r2_k: list[float]
    """Per target layer, of content keys on the held-out prefixes; reported, never gating (field-bugs O4)."""
    r2_v: list[float]
    weights: str = ""
    """sha256 of the bundle's weights: of these and no others the report speaks. Empty: it does not say."""
    kind: Kind = "text"
    """On what it judged."""
    flops_per_token: int = 0
    """Of the projector, two for each multiply-add; 0 = not said, likewise below."""
    compare_flops_per_token: int = 0
    prefill_flops_per_token: float = 0.0
    """Of the target's own prefill, mean over a prompt of 1024 tokens (`cost.prefill_flops`)."""
    by_position: list[Span] = []
    by_length: list[LengthCheck] = []
    """At an eighth, a quarter, half and all of the prefix, on the first documents only (`Protocol.length_documents`)."""
    long: LengthCheck | None = None
    """At four times the prefix."""
    turns: list[float] = []
    """KL per turn of a conversation in which each turn's prompt is mapped and each answer is computed by the target over all
    that is before it, so that its own errors pile up: KL(native ‖ this), mean over the answer's tokens and the documents."""
    generation_retention: float | None = None
    """Greedy answers over the mapped cache against those over the native one: the share of an answer's tokens before the first
    that differs, mean over documents. The native cache against itself is 1. One near tie ends the count, so that a retention of
    0.5 is usual where 97 % of single tokens agree: it is no share of a task's score."""
    generation_same: float | None = None
    """Share of these answers that are equal throughout."""

    def arm(self, name: str) -> Arm:
        """Raises BundleCorrupt if the report has no such arm."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise BundleCorrupt("the report lacks an arm", need=name, have=", ".join(a.name for a in self.arms))


def to_json(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1)


def from_json(raw: bytes) -> Report:
    """Raises BundleCorrupt for anything but a report of this format."""
    try:
        report = msgspec.json.decode(raw, type=Report)
    except (msgspec.DecodeError, msgspec.ValidationError) as e:
        raise BundleCorrupt(f"report: {e}") from e
    if report.format != FORMAT:
        raise BundleCorrupt("report of another format", need=str(FORMAT), have=str(report.format))
    return report


def bound(report: Report, bundle: Bundle) -> None:
    """Raises BundleCorrupt if the report does not speak of this bundle's weights."""
    need = bundle.sums[WEIGHTS]
    if report.weights != need:
        raise BundleCorrupt(
            "the report speaks of other weights", key=str(bundle.folder), need=need, have=report.weights or "none"
        )


def read_report(path: Path) -> Report:
    """Raises BundleCorrupt (unreadable, too large, not a report)."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise BundleCorrupt("report too large", key=str(path), need=f"<= {_MAX_BYTES} B")
        return from_json(path.read_bytes())
    except OSError as e:
        raise BundleCorrupt("cannot read the report", key=str(path), have=e.strerror or str(e)) from e


def recovery(native: float, none: float, arm: float) -> float | None:
    """Share of what the context is worth (in NLL) that an arm keeps; None if it is worth too little to say."""
    return (none - arm) / (none - native) if none - native >= MIN_GAIN else None


_HEADS = ("arm", "NLL", "recovery", "KL", "KL p95", "top-1", "facts", "attn", "answer NLL", "recovery")
_SHORT = 8
"""Columns that fit a terminal."""


def _cells(arm: Arm) -> list[str]:
    worst = min(arm.attention_cosine) if arm.attention_cosine else None
    numbers = [arm.nll, arm.recovery, arm.kl_mean, arm.kl_p95, arm.top1, arm.facts, worst]
    numbers += [arm.answer_nll, arm.answer_recovery]
    return [arm.name, *("–" if n is None else f"{n:.3f}" for n in numbers)]


def table(report: Report) -> Table:
    """For a terminal."""
    found = Table(title=f"{report.source} → {report.target} ({report.projector})", caption=_caption(report))
    for i, head in enumerate(_HEADS[:_SHORT]):
        found.add_column(head, justify="right" if i else "left", no_wrap=True)
    for arm in report.arms:
        found.add_row(*_cells(arm)[:_SHORT])
    return found


def markdown(report: Report) -> str:
    """For `report.md`."""
    lines = [f"# {report.source} → {report.target} ({report.projector})", "", _caption(report), ""]
    lines += ["| " + " | ".join(_HEADS) + " |", "|" + "---|" * len(_HEADS)]
    lines += ["| " + " | ".join(_cells(a)) + " |" for a in report.arms]
    lines += ["", "| target layer | R² of keys | R² of values |", "|---|---|---|"]
    lines += [f"| {i} | {k:.3f} | {v:.3f} |" for i, (k, v) in enumerate(zip(report.r2_k, report.r2_v, strict=True))]
    lines += _more(report)
    return "\n".join(
        [
            *lines,
            "",
            "Attn: cosine of the attention output with native, worst layer. R² never decides: it predicts no quality.",
            "",
        ]
    )


def _more(report: Report) -> list[str]:
    """The measures that only some reports have."""
    p, lines = report.protocol, [""]
    if report.by_position:
        lines += ["| tokens behind the prefix | KL | top-1 |", "|---|---|---|"]
        lines += [f"| {s.label} | {s.kl_mean:.3f} | {s.top1:.3f} |" for s in report.by_position]
        lines += [""]
    if lengths := [*report.by_length, *([report.long] if report.long else [])]:
        lines += ["| prefix | documents | KL | top-1 | recovery |", "|---|---|---|---|---|"]
        for c in lengths:
            kept = "–" if c.recovery is None else f"{c.recovery:.3f}"
            lines += [f"| {c.tokens} | {c.documents} | {c.kl_mean:.3f} | {c.top1:.3f} | {kept} |"]
        lines += [""]
    if report.turns:
        drift = ", ".join(f"{kl:.3f}" for kl in report.turns)
        lines += [f"KL by turn of a conversation ({p.turn_documents} documents): {drift}.", ""]
    if report.generation_retention is not None and report.generation_same is not None:
        lines += [
            f"Greedy answers of {p.generated_tokens} tokens ({p.generated_documents} documents): "
            f"{report.generation_retention:.3f} of an answer before the first token that differs from native, "
            f"{report.generation_same:.3f} of the answers equal throughout.",
            "",
        ]
    if report.prefill_flops_per_token and report.flops_per_token:
        share = report.flops_per_token / report.prefill_flops_per_token
        lines += [
            f"{report.flops_per_token / 1e6:.2f} MFLOP per token, {share:.1%} of the target's own prefill at 1 K."
        ]
    return lines[:-1] if not lines[-1] else lines


def _caption(report: Report) -> str:
    p = report.protocol
    facts = ""
    if p.fact_questions:
        facts = f"; {p.fact_questions} questions on {p.fact_documents} fact documents ({p.fact_form}), chance {p.fact_chance:.3f}"
    return (
        f"{p.documents} held-out documents: {p.prefix_tokens} tokens of prefix, then {p.continuation_tokens}; "
        f"pages of {p.page_size}, page 0 {p.first_page}; no_context = {p.no_context}{facts}"
    )
