"""The report's pictures (PNG). matplotlib is in the extra `plots`, and is imported only when a picture is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.conductor.simulate import hit_tables, paper
from moonpool.conductor.simulate.case import Case, Summary
from moonpool.conductor.simulate.hit_tables import HitCase
from moonpool.conductor.simulate.report import Report
from moonpool.conductor.simulate.run_tables import (
    CLOSEST,
    OVERLOADS,
    SPLITS,
    STAGES,
    STRATEGIES,
    nic_case,
    overload_case,
    replica_case,
    split_case,
    strategy_case,
)
from moonpool.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDE, _TALL = 8.0, 4.2
_OURS, _PAPER = "#1f6f8b", "#d1782f"


def draw_all(report: Report, folder: Path) -> list[Path]:
    """ConfigError where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError as e:
        raise ConfigError("plots need matplotlib", fix="pip install 'moonpool[plots]'") from e
    mpl.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[Report, Figure], None]] = {
        "hit_by_capacity": _hit_by_capacity,
        "ttft_by_policy": _ttft_by_policy,
        "load_over_time": _load_over_time,
        "tbt_within": _tbt_within,
        "replicas": _replicas,
        "ttft_by_nic": _ttft_by_nic,
        "split": _split,
    }
    paths = []
    for name, draw in pictures.items():
        figure = pyplot.figure(figsize=(_WIDE, _TALL), layout="constrained")
        draw(report, figure)
        if figure.axes:
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=140)
            paths.append(path)
        pyplot.close(figure)
    return paths


def _axes(figure: Figure, count: int, share_y: bool = True) -> list[Axes]:
    axes = figure.subplots(1, count, squeeze=False, sharey=share_y)
    for ax in axes[0]:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", alpha=0.3)
    return list(axes[0])


def _hit_by_capacity(report: Report, figure: Figure) -> None:
    sizes = sorted(c for c in paper.CAPACITIES if c)
    for ax, (name, path) in zip(_axes(figure, len(report.plan.traces)), report.plan.traces.items(), strict=True):
        for policy in hit_tables.POLICIES:
            rates = [report.rates[HitCase(path, policy, c)].token for c in sizes]
            bold = policy in (hit_tables.OURS, "belady")
            style = {"color": "black", "linestyle": "--"} if policy == "belady" else {}
            ax.plot(sizes, rates, marker=".", linewidth=2.2 if bold else 1.1, label=policy, **style)  # type: ignore[arg-type]
        ax.set_xscale("log")
        ax.set(title=name, xlabel="capacity, blocks of 512 tokens", ylim=(0, None))
    figure.axes[0].set_ylabel("share of tokens found")
    figure.axes[0].legend(frameon=False, fontsize=8)


def _ttft_by_policy(report: Report, figure: Figure) -> None:
    for ax, (name, path) in zip(_axes(figure, len(report.plan.traces)), report.plan.traces.items(), strict=True):
        runs = [report.runs[strategy_case(path, p, CLOSEST, 1.0)].ttft for p in STRATEGIES]
        boxes = [
            {"med": t.median, "q1": t.q1, "q3": t.q3, "whislo": t.low, "whishi": t.high, "mean": t.mean, "label": p}
            for t, p in zip(runs, STRATEGIES, strict=True)
        ]
        ax.bxp(boxes, showfliers=False, showmeans=True, medianprops={"color": _OURS})
        if name == "conversation":
            for i, policy in enumerate(STRATEGIES, 1):
                if policy in paper.FIG_5:
                    ax.plot(i + 0.36, paper.FIG_5[policy][0], marker="*", color=_PAPER, linestyle="", markersize=9)
            ax.plot([], [], marker="*", color=_PAPER, linestyle="", label="paper's mean (16 nodes)")
            ax.legend(frameon=False, fontsize=8)
        ax.set_yscale("symlog", linthresh=1.0)
        ax.set(title=f"{name}, {CLOSEST} prefill nodes")
        ax.tick_params(axis="x", rotation=25)
    figure.axes[0].set_ylabel("time to first token, s (5 … 95 %)")


def _load_over_time(report: Report, figure: Figure) -> None:
    path = report.plan.traces.get("conversation")
    if path is None:
        return
    figure.set_size_inches(_WIDE, 1.6 * _TALL)
    prefill, decode, speed = OVERLOADS[0]
    axes = figure.subplots(len(STAGES), 1, sharex=True, squeeze=False)[:, 0]
    for ax, stage in zip(axes, STAGES, strict=True):
        run = report.runs[overload_case(path, stage, OVERLOADS[0])]
        times = [x.at / 60 for x in run.load]
        ax.plot(times, [x.prefill for x in run.load], color=_OURS, linewidth=1)
        ax.set_ylabel("on a prefill\ninstance", color=_OURS)
        right = ax.twinx()
        right.plot(times, [x.decode for x in run.load], color=_PAPER, linewidth=1)
        right.set_ylabel("on a decode\ninstance", color=_PAPER)
        ax.set_title(
            f"{stage}: correlation {run.correlation:.2f}, wasted prefill {run.wasted_s:.0f} node s", fontsize=10
        )
        for one in (ax, right):
            one.set_ylim(bottom=0)
            one.spines["top"].set_visible(False)
    axes[-1].set_xlabel("minutes")
    figure.suptitle(f"Requests on an instance, conversation at {speed:g}x, {prefill}P + {decode}D")


def _tbt_within(report: Report, figure: Figure) -> None:
    for ax, (name, path) in zip(_axes(figure, len(report.plan.traces)), report.plan.traces.items(), strict=True):
        within = report.runs[strategy_case(path, "kvcache", 8, 1.0)].tbt_within
        ax.plot(list(within), [100 * v for v in within.values()], marker="o", color=_OURS, label="ours, 8P + 8D")
        theirs = paper.TBT_WITHIN.get(name)
        if theirs:
            ax.plot(
                list(theirs), [100 * v for v in theirs.values()], marker="s", color=_PAPER, label="paper's Mooncake"
            )
        ax.set_xscale("log")
        ax.set_xticks(list(within), [str(ms) for ms in within])
        ax.minorticks_off()
        ax.set(title=name, xlabel="time between tokens, ms", ylim=(0, 103))
    figure.axes[0].set_ylabel("requests within, %")
    figure.axes[0].legend(frameon=False, loc="lower right")


def _replicas(report: Report, figure: Figure) -> None:
    for ax, (name, path) in zip(_axes(figure, len(report.plan.traces)), report.plan.traces.items(), strict=True):
        for replicate, style in ((False, ":"), (True, "-")):
            run = report.runs[replica_case(path, report.plan.watched[name], replicate)]
            times = [t / 60 for t, _ in run.replicas]
            for i, rank in enumerate(paper.FIG_11_RANKS):
                label = f"{rank}th block" if replicate else None
                counts = [counts[i] for _, counts in run.replicas]
                ax.plot(times, counts, color=f"C{i}", linestyle=style, linewidth=1.3, label=label)
        ax.set(title=name, xlabel="minutes", ylim=(0, 8.3))
    figure.axes[0].set_ylabel("replicas (dotted: transfers alone)")
    figure.axes[0].legend(frameon=False, fontsize=8)


def _pair(
    figure: Figure, labels: Sequence[str], ours: Sequence[float], theirs: Sequence[float], title: str, y: str
) -> None:
    (ax,) = _axes(figure, 1)
    places = range(len(labels))
    ax.bar([i - 0.2 for i in places], ours, width=0.38, color=_OURS, label="ours")
    ax.bar([i + 0.2 for i in places], theirs, width=0.38, color=_PAPER, label="paper")
    ax.set_xticks(list(places), labels)
    ax.set_title(title, loc="left", fontsize=10)
    ax.set_ylabel(y)
    ax.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 1.12), ncols=2)


def _ttft_by_nic(report: Report, figure: Figure) -> None:
    runs = _synthetic(report, [(str(rate), rate) for rate in paper.FIG_13], nic_case)
    if runs:
        theirs = [ttft for ttft, _ in paper.FIG_13.values()]
        labels = list(runs)
        ours = [run.ttft.mean for run in runs.values()]
        _pair(figure, labels, ours, theirs, "Synthetic trace, 8P + 8D", "mean time to first token, s")
        figure.axes[0].set_xlabel("NIC, Gb/s")


def _synthetic(
    report: Report, cases: Sequence[tuple[str, int]], make: Callable[[str, int], Case]
) -> dict[str, Summary]:
    path = report.plan.traces.get("synthetic")
    return {} if path is None else {label: report.runs[make(path, value)] for label, value in cases}


def _split(report: Report, figure: Figure) -> None:
    path = report.plan.traces.get("synthetic")
    if path is None:
        return
    labels = [f"{p}P + {d}D" for p, d in SPLITS]
    ours = [100 * report.runs[split_case(path, p, d)].good for p, d in SPLITS]
    theirs = [100 * paper.FIG_15[s] for s in SPLITS]
    _pair(figure, labels, ours, theirs, "Synthetic trace, TTFT 10 s and TBT 100 ms", "requests within both limits, %")
