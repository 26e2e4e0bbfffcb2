"""A report as one page of plots, for `report.png`: quality by layer, by position, by length, and what it costs."""

from __future__ import annotations

import io
from typing import Any

from moonpool.c2c.judging.report import Arm, Report
from moonpool.plotting import plotting

_INK = {"mapped": "tab:blue", "compare": "tab:orange", "tail16": "tab:cyan", "native": "black"}
_DASHES = {"compare": (0, (4, 4)), "wrong_document": ":"}
"""Of lines that may lie on another: what is under `compare` shows between its dashes."""


def page(report: Report) -> bytes:
    """PNG. Raises ConfigError where matplotlib is missing."""
    plt = plotting()
    figure, axes = plt.subplots(3, 2, figsize=(11, 12), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
    panels = (_by_layer, _r2, _by_position, _by_length, _arms, _cost)
    for draw, ax in zip(panels, axes.flat, strict=True):
        draw(ax, report)
        ax.grid(alpha=0.3)
        ax.set_axisbelow(True)
    p = report.protocol
    measured = f"{p.documents} held-out documents ({report.kind}), {p.prefix_tokens} tokens of prefix, then {p.continuation_tokens}"
    figure.suptitle(f"{report.source} → {report.target} ({report.projector})\n{measured}", fontsize=11)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    plt.close(figure)
    return out.getvalue()


def _by_layer(ax: Any, report: Report) -> None:
    for arm in report.arms:
        if arm.attention_cosine and arm.name in (*_INK, "wrong_document"):
            style = _DASHES.get(arm.name, "-")
            ax.plot(
                arm.attention_cosine, linestyle=style, color=_INK.get(arm.name, "tab:gray"), marker=".", label=arm.name
            )
    ax.set(title="attention output against native", xlabel="target layer", ylabel="cosine")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(fontsize=8)


def _r2(ax: Any, report: Report) -> None:
    ax.plot(report.r2_k, marker=".", color="tab:purple", label="keys")
    ax.plot(report.r2_v, marker=".", color="tab:green", label="values")
    ax.set(title="explained variance (decides nothing)", xlabel="target layer", ylabel="R²", ylim=(None, 1.02))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(fontsize=8)


def _by_position(ax: Any, report: Report) -> None:
    if not report.by_position:
        return _empty(ax, "quality by position")
    names = [s.label for s in report.by_position]
    ax.bar(names, [s.kl_mean for s in report.by_position], color=_INK["mapped"], alpha=0.6)
    ax.set(title="by position", xlabel="tokens behind the prefix", ylabel="KL, nats")
    _agreement(ax, names, [s.top1 for s in report.by_position])
    return None


def _by_length(ax: Any, report: Report) -> None:
    found = [*report.by_length, *([report.long] if report.long else [])]
    if not found:
        return _empty(ax, "quality by length")
    names = [str(c.tokens) for c in found]
    ax.bar(names, [c.kl_mean for c in found], color=_INK["mapped"], alpha=0.6)
    ax.set(
        title="by length (the last one far beyond the fit)" if report.long else "by length", xlabel="tokens of prefix"
    )
    ax.set_ylabel("KL, nats")
    _agreement(ax, names, [c.top1 for c in found])
    return None


def _agreement(ax: Any, names: list[str], values: list[float]) -> None:
    """Top-1 agreement on an axis of its own."""
    other = ax.twinx()
    other.plot(names, values, color="tab:red", marker="o")
    other.set_ylim(min(0.5, *values), 1.01)
    other.set_ylabel("top-1 agreement", color="tab:red")


def _arms(ax: Any, report: Report) -> None:
    shown = [a for a in report.arms if a.name != "native"]
    ax.barh([a.name for a in shown], [a.kl_mean for a in shown], color=[_INK.get(a.name, "tab:gray") for a in shown])
    ax.invert_yaxis()
    ax.set(title="all arms", xlabel="KL to native, nats")


def _cost(ax: Any, report: Report) -> None:
    """Cost against quality; the line is what the target would pay to compute the tokens itself."""
    own, points = report.prefill_flops_per_token, _points(report)
    for arm, cost in points:
        ink, place = _INK.get(arm.name, "tab:gray"), (cost / 1e6, arm.recovery or 0.0)
        if arm.name == "compare":  # a ring: both show where two maps are alike
            ax.scatter(*place, s=110, facecolors="none", edgecolors=ink, label=arm.name, zorder=3)
        else:
            ax.scatter(*place, color=ink, label=arm.name, zorder=3)
    ax.axvline(own / 1e6, color="black", linestyle="--", linewidth=1, label="the target's own prefill at 1 K")
    ax.axhline(1, color="black", linewidth=0.5)
    ax.set(
        title="cost against quality",
        xlabel="MFLOP per token",
        ylabel="recovery",
        ylim=(min([-0.1, *(a.recovery or 0 for a, _ in points)]), 1.1),
    )
    ax.legend(fontsize=8, loc="best")


def _points(report: Report) -> list[tuple[Arm, float]]:
    """Arms with a recovery, and what each token of the prefix costs there."""
    own, p = report.prefill_flops_per_token, report.protocol
    tail = min(16, p.prefix_tokens) / p.prefix_tokens
    costs = {
        "native": own,
        "mapped": report.flops_per_token,
        "compare": report.compare_flops_per_token,
        "tail16": report.flops_per_token * (1 - tail) + own * tail,
        "no_context": 0.0,
    }
    return [(a, costs[a.name]) for a in report.arms if a.name in costs and a.recovery is not None]


def _empty(ax: Any, title: str) -> None:
    ax.set(title=title, xticks=[], yticks=[])
    ax.text(0.5, 0.5, "not measured", ha="center", va="center", transform=ax.transAxes, color="gray")
