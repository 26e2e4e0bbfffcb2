"""What the target says over converted pages: the evaluator, run anew on held-out documents, for the shipped bundle and for other
maps fitted on the same tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from recipes import judge as recipes_judge
from recipes import qwen

from benchmarks import figures
from benchmarks.c2c.pairs import Pair
from models import fit_bundles
from moonpool import paths
from moonpool.c2c.bundle import open_bundle
from moonpool.c2c.cost import prefill_flops
from moonpool.c2c.gate import Thresholds, judge
from moonpool.c2c.judging.report import Kind, Report
from moonpool.c2c.projectors.base import Projector
from moonpool.c2c.signature import load_spec
from moonpool.testing.damage import damage

Judge = Callable[[Projector, Kind], Report]
"""The evaluator on one map and one kind of documents."""
CONTEXT = 1024


def measure(pair: Pair, documents: int) -> dict[str, float]:
    """The issue's figures of one direction, and a table of all maps there are."""
    judged = _judge(pair, documents)
    shipped = open_bundle(pair.bundle).projector()
    main = judged(shipped, "code")
    found = {f"{pair.label}_{name}": value for name, value in _figures(main).items()}
    share = _share(pair, shipped)
    rows = [("shipped", *_row(shipped, share, main))]
    for name, folder in pair.baselines.items():
        other = open_bundle(folder).projector()
        report = judged(other, "code")
        rows.append((name, *_row(other, _share(pair, other), report)))
        found[f"{pair.label}_kl_{folder.name.rsplit('-', 1)[-1]}"] = report.arm("mapped").kl_mean
    if pair.label == "qwen_l2s":
        kinds: tuple[Kind, ...] = ("prose", "chat")
        found |= _on_text([judged(shipped, kind) for kind in kinds])
        found["qwen_l2s_flop_fraction"] = share
    heads = ("map", "MFLOP/token", "of prefill", "KL", "top-1", "recovery", "exact answers ÷ native", "wrong document")
    figures.show(f"{pair.source} → {pair.target}", rows, heads)
    return found


def _judge(pair: Pair, documents: int) -> Judge:
    if pair.name == "bundled":
        return lambda projector, _kind: fit_bundles.judge_one(projector, pair.source, pair.target)
    opened = qwen.open_pair(pair.direction, 0, torch.float32, {})
    facts = {"code": min(recipes_judge.FACTS, documents)}
    return lambda projector, kind: recipes_judge.judge(
        opened, kind, projector, documents=documents, facts=facts.get(kind, 0)
    )


def _figures(report: Report) -> dict[str, float]:
    mapped, native, wrong = (report.arm(n) for n in ("mapped", "native", "wrong_document"))
    found = {"kl": mapped.kl_mean, "top1": mapped.top1, "recovery": mapped.recovery}
    found["em_ratio"] = (mapped.facts or 0.0) / native.facts if native.facts else None
    found["wrong_document_em"] = wrong.facts
    return {name: value for name, value in found.items() if value is not None}


def _on_text(reports: list[Report]) -> dict[str, float]:
    """Means over prose and chat."""
    arms = [_figures(r) for r in reports]
    return {f"qwen_l2s_text_{n}": sum(a[n] for a in arms) / len(arms) for n in ("kl", "top1", "recovery")}


def _share(pair: Pair, projector: Projector) -> float:
    """Of the target's own prefill, at CONTEXT tokens."""
    return projector.flops_per_token() / prefill_flops(load_spec(paths.find_model(pair.target)), CONTEXT)


def _row(projector: Projector, share: float, report: Report) -> tuple[str, ...]:
    f = _figures(report)
    cells = [f.get(n) for n in ("kl", "top1", "recovery", "em_ratio", "wrong_document_em")]
    first = (f"{projector.flops_per_token() / 1e6:.1f}", f"{share:.1%}")
    return (*first, *("–" if c is None else f"{c:.3f}" for c in cells))


def gate_rejects_damaged(pair: Pair) -> float:
    """1 if the gate passes the shipped bundle and refuses one with 10 % of one layer's weights at 0, both judged anew by what the
    shipped one shows: thresholds a tenth above its figures."""
    judged = _judge(pair, 6)
    sound = judged(open_bundle(pair.bundle).projector(), "code")
    thresholds = within(sound)
    with tempfile.TemporaryDirectory() as folder:
        broken = damage(open_bundle(pair.bundle), Path(folder) / "damaged", 1, 0.1)
        return float(
            judge(sound, thresholds).passed and not judge(judged(broken.projector(), "code"), thresholds).passed
        )


def within(report: Report, slack: float = 0.1) -> Thresholds:
    """Thresholds that this report meets and one that is a tenth worse does not."""
    arm, native = report.arm("mapped"), report.arm("native")
    facts = (arm.facts or 0.0) / native.facts if native.facts else 0.0
    return Thresholds(
        kl_mean=arm.kl_mean * (1 + slack),
        kl_p95=arm.kl_p95 * (1 + slack),
        top1=arm.top1 * (1 - slack),
        recovery=max(0.0, (arm.recovery or 0.0) * (1 - slack)),
        attention_cosine=max(0.0, min(arm.attention_cosine) * (1 - slack)),
        facts=facts * (1 - slack),
    )
