"""`moonpool simulate tables`: finds the traces of a folder, makes all runs, and writes tables, plots and figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec

from moonpool.conductor.simulate import hit_tables, paper
from moonpool.conductor.simulate.case import Case, Summary
from moonpool.conductor.simulate.hit_tables import HitCase
from moonpool.conductor.simulate.hits import HitRate
from moonpool.conductor.simulate.parallel import run_all
from moonpool.conductor.simulate.run_tables import CLOSEST, Plan, strategy_case
from moonpool.conductor.simulate.table import Table, Value
from moonpool.conductor.simulate.trace import Trace, load, prefix_breaks
from moonpool.errors import TraceError

_KNOWN = ("conversation", "synthetic")


Done: TypeAlias = Callable[[], None]
"""Called after each run."""


class Report(msgspec.Struct, frozen=True):
    plan: Plan
    tables: list[Table]
    rates: dict[HitCase, HitRate]
    runs: dict[Case, Summary]


def find_traces(folder: Path) -> dict[str, str]:
    """Paths of the traces that tables can be made of, by name. TraceError where there is none."""
    found = {name: folder / f"{name}_trace.jsonl" for name in _KNOWN}
    there = {name: str(path) for name, path in found.items() if path.is_file()}
    if not there:
        raise TraceError(
            "no trace in this folder",
            key=str(folder),
            need=" or ".join(path.name for path in found.values()),
            fix="They are published in the FAST25-release/traces folder of the Mooncake repository.",
        )
    return there


def make(traces: dict[str, str], processes: int, started: Callable[[int], Done]) -> Report:
    """`started` is told how many runs there are, and answers what to call after each."""
    loaded = {name: load(Path(path)) for name, path in traces.items()}
    plan = Plan(traces, {name: hot_blocks(trace) for name, trace in loaded.items()})
    hits, cases = hit_tables.hit_cases(traces), plan.cases()
    rates, runs = run_all(hits, cases, processes, started(len(hits) + len(cases)))
    tables = [_statistics(loaded, rates, traces), *hit_tables.hit_tables(traces, rates), *plan.tables(runs)]
    return Report(plan, tables, rates, runs)


def hot_blocks(trace: Trace) -> tuple[int, ...]:
    """The blocks of the paper's ranks by use."""
    ranked = [
        key for key, _ in Counter(key for keys in trace.keys for key in keys).most_common(max(paper.FIG_11_RANKS))
    ]
    return tuple(ranked[min(rank, len(ranked)) - 1] for rank in paper.FIG_11_RANKS)


def figures(report: Report) -> dict[str, float]:
    """What `build/figures/simulate.json` holds; only of the traces that are there."""
    out: dict[str, float] = {}
    for name, path in report.plan.traces.items():
        out[f"hit_inf_{name}"] = round(report.rates[HitCase(path, "lru", None)].block, 4)
        out[f"prefill_s_{name}"] = report.runs[strategy_case(path, "kvcache", 8, 1.0)].prefill_s
    if (synthetic := report.plan.traces.get("synthetic")) is not None:
        out["fig9_synthetic_max_diff_pp"] = hit_tables.fig_9_difference("synthetic", synthetic, report.rates)
        out["policy_gap_closed_synthetic"] = hit_tables.gap_closed(synthetic, hit_tables.OURS, report.rates)
    if (talk := report.plan.traces.get("conversation")) is not None:
        out["policy_gap_closed"] = hit_tables.gap_closed(talk, hit_tables.OURS, report.rates)
        for label, policy in (
            ("random", "random"),
            ("load", "least_requests"),
            ("local", "local"),
            ("global", "kvcache"),
        ):
            out[f"ttft_{label}_s"] = report.runs[strategy_case(talk, policy, CLOSEST, 1.0)].ttft.mean
        for label, policy in (("local", "local"), ("global", "kvcache")):
            out[f"within_30s_2x_{label}"] = report.runs[strategy_case(talk, policy, 8, 2.0)].within_ttft
    return out


def _statistics(traces: dict[str, Trace], rates: dict[HitCase, HitRate], paths: dict[str, str]) -> Table:
    rows: list[tuple[Value, ...]] = []
    for name, trace in traces.items():
        uses = Counter(key for keys in trace.keys for key in keys)
        rate = rates[HitCase(paths[name], "lru", None)]
        once = sum(n == 1 for n in uses.values()) / len(uses)
        count = len(trace.arrivals)
        answers = sum(a.output_tokens for a in trace.arrivals) / count
        rows.append(
            (
                name,
                *(count, trace.seconds, trace.tokens / count, answers, sum(uses.values()), len(uses), once),
                *(rate.block, rate.token, rate.request, prefix_breaks(trace.keys)),
            )
        )
    return Table(
        "traces",
        "The traces; hit rates are of an endless cache",
        (
            *("trace", "requests", "seconds", "mean input", "mean output", "blocks", "distinct", "used once"),
            *("hit by block", "by token", "by request", "broken chains"),
        ),
        rows,
    )


def write_csv(report: Report, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for table in report.tables:
        path = folder / f"{table.name}.csv"
        path.write_text(table.csv())
        paths.append(path)
    return paths
