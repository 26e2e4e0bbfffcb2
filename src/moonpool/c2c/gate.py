"""The gate: whether a bundle's report is good enough to serve it. Pure, but for `examine`, which reads the report.

    judge(report, thresholds) ─► Verdict          what the report must show
    examine(bundle, thresholds) ─► Verdict        the same, and that the report is there and speaks of these very weights

R² takes no part: it predicts no quality (field-bugs O4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from moonpool.c2c.bundle import WEIGHTS, Bundle
from moonpool.c2c.judging.report import Arm, Report, from_json
from moonpool.errors import BundleCorrupt, ConfigError, ConversionRefused

Measure = Literal[
    "kl_mean", "kl_p95", "top1", "attention_cosine", "recovery", "facts", "wrong_facts", "generation", "long"
]
REPORT = "report.json"
REMEDY = "Judge it with `moonpool c2c eval --into-bundle`, or serve it all the same with `force: true` in the rule."
_TEXT = "moonpool c2c eval --text FILES --into-bundle"
_FACTS = "moonpool c2c eval --facts 8 --into-bundle"


class GateRefused(ConversionRefused):
    """The bundle's report does not show what the rule's `gate` asks for, or there is none."""


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a report must show of the `mapped` arm."""

    kl_mean: float = 0.25
    """At most: KL(native ‖ mapped) of the next token, nats. For chat 0.15 is usual."""
    kl_p95: float = 1.0
    """At most: its 95th percentile."""
    top1: float = 0.90
    """At least: share of tokens whose most likely next token is the native one."""
    attention_cosine: float = 0.90
    """At least, in the worst layer."""
    recovery: float = 0.90
    """At least: share of what the context is worth."""
    facts: float = 0.95
    """At least: exact answers to context-only questions, as a share of the native ones."""
    wrong_facts: float = 0.05
    """At most: how far above chance such questions are answered over another document's cache."""
    generation: float = 0.5
    """At least, and only where `demand` names it: share of a greedy answer before its first token that differs from native. One near
    tie ends the count, so it is no share of a task's score: 0.5 is usual where 97 % of single tokens agree."""
    long: float = 0.10
    """At most: how much worse than `kl_mean`, `top1` and `recovery` allow at a multiple of the fitted length, as a share of them."""
    demand: tuple[Measure, ...] = (
        "kl_mean",
        "kl_p95",
        "top1",
        "attention_cosine",
        "recovery",
        "facts",
        "wrong_facts",
    )
    """Measures that a report must have. `long` is judged where it has it, too."""

    def check(self, place: str) -> None:
        """Raises ConfigError for a bound that no report, or every one, could meet."""
        for name in ("top1", "attention_cosine", "recovery", "facts", "wrong_facts", "generation", "long"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"gate.{name} out of range", key=place, need="0..1", have=str(getattr(self, name)))
        for name in ("kl_mean", "kl_p95"):
            if not 0 < getattr(self, name) <= 100:
                raise ConfigError(f"gate.{name} out of range", key=place, need="> 0", have=str(getattr(self, name)))


class Verdict(msgspec.Struct, frozen=True):
    passed: bool
    failures: list[str]
    """Each names the measure, what is needed and what there is."""
    kl_mean: float = 0.0
    """The report's, for shadow checks to be held against; 0 without a report."""

    @property
    def text(self) -> str:
        return "; ".join(self.failures)


@dataclass(frozen=True, slots=True)
class _Finding:
    measure: Measure
    have: float | None
    need: float
    at_most: bool = False
    what: str = ""
    """Which value it is, where the measure's name does not say so."""
    missing: str = ""
    """Why it is not there, and the command that makes it."""

    def failure(self, demanded: bool) -> str:
        name = f"{self.measure} {self.what}".rstrip()
        if self.have is None:
            return f"{name}: needed, and {self.missing}" if demanded else ""
        good = self.have <= self.need if self.at_most else self.have >= self.need  # NaN is never good
        return "" if good else f"{name}: needed {'<=' if self.at_most else '>='} {self.need:.3g}, is {self.have:.3g}"


def judge(report: Report, thresholds: Thresholds) -> Verdict:
    """Hold a report against the thresholds. Raises BundleCorrupt if it lacks the arms that every report has."""
    mapped = report.arm("mapped")
    found = [*_on_text(mapped, thresholds), *_on_facts(report, mapped, thresholds), *_on_more(report, thresholds)]
    failures = [why for f in found if (why := f.failure(f.measure in thresholds.demand))]
    return Verdict(not failures, failures, mapped.kl_mean)


def _on_text(mapped: Arm, t: Thresholds) -> Iterator[_Finding]:
    yield _Finding("kl_mean", mapped.kl_mean, t.kl_mean, at_most=True)
    yield _Finding("kl_p95", mapped.kl_p95, t.kl_p95, at_most=True)
    yield _Finding("top1", mapped.top1, t.top1)
    cosines = mapped.attention_cosine
    worst = min(range(len(cosines)), key=cosines.__getitem__) if cosines else None
    yield _Finding(
        "attention_cosine",
        None if worst is None else cosines[worst],
        t.attention_cosine,
        what="" if worst is None else f"of layer {worst}",
        missing=f"not in the report: `{_TEXT}`",
    )
    why = f"these texts are worth too little to the native model to measure it: `{_TEXT}` with other FILES"
    yield _Finding("recovery", mapped.recovery, t.recovery, missing=why)


def _on_facts(report: Report, mapped: Arm, t: Thresholds) -> Iterator[_Finding]:
    native, chance = report.arm("native").facts, report.protocol.fact_chance
    wrong = [a.facts for a in report.arms if a.name in ("wrong_document", "wrong_mapped") and a.facts is not None]
    missing, ratio = f"no questions were asked: `{_FACTS}`", None
    if native is not None and native <= chance + t.wrong_facts:
        missing = "the native model itself answers no more than chance: no questions for this target"
    elif native is not None and mapped.facts is not None:
        ratio = mapped.facts / native
    yield _Finding("facts", ratio, t.facts, what="as a share of native", missing=missing)
    yield _Finding(
        "wrong_facts",
        max(wrong, default=None),
        chance + t.wrong_facts,
        at_most=True,
        what=f"over another document's cache (chance {chance:.3g})",
        missing=missing,
    )


def _on_more(report: Report, t: Thresholds) -> Iterator[_Finding]:
    """What only some reports have."""
    if "generation" in t.demand:
        kept = report.generation_retention
        yield _Finding("generation", kept, t.generation, missing="not in the report: `moonpool c2c eval`")
    long = report.long
    if long is None:
        yield _Finding("long", None, t.long, missing="not in the report: `moonpool c2c eval`")
        return
    yield _Finding("long", long.kl_mean, t.kl_mean * (1 + t.long), at_most=True, what="kl_mean")
    yield _Finding("long", long.top1, t.top1 * (1 - t.long), what="top1")
    if long.recovery is not None:
        yield _Finding("long", long.recovery, t.recovery * (1 - t.long), what="recovery")


def examine(bundle: Bundle, thresholds: Thresholds) -> Verdict:
    """Judge a bundle by the report that it carries. An unreadable report is as none."""
    if REPORT not in bundle.sums:
        return Verdict(False, ["report: there is none"])
    try:
        report = from_json(bundle.read(REPORT))
        if why := unbound(report, bundle):
            return Verdict(False, [f"report: {why}"])
        return judge(report, thresholds)
    except BundleCorrupt as e:
        return Verdict(False, [f"report: {e}"])


def unbound(report: Report, bundle: Bundle) -> str:
    """Why a report does not speak of this bundle's weights; empty if it does."""
    need, have = bundle.sums[WEIGHTS], report.weights
    if not have:
        return "it does not say of which weights it speaks"
    return "" if have == need else f"it speaks of other weights: needed sha256 {need[:12]}…, is {have[:12]}…"
