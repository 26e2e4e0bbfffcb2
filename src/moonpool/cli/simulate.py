"""`moonpool simulate run TRACE` plays a trace through a simulated cluster; `moonpool simulate tables` makes the papers' tables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from moonpool.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress

    from moonpool.conductor.simulate.case import Case, Summary


class _TraceOrCommand(TyperGroup):
    """`moonpool simulate TRACE` is `moonpool simulate run TRACE`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["run", *args])


app = typer.Typer(
    cls=_TraceOrCommand,
    help="The conductor under a simulated clock: published traces, the paper's machines.",
    no_args_is_help=True,
)
_WIDTH = 170


@app.command("run")
def play(
    trace: Annotated[Path, typer.Argument(help="A .jsonl trace (Mooncake's FAST25-release/traces, or your own).")],
    policy: Annotated[str, typer.Option(help="See `moonpool conductor --help`.")] = "kvcache",
    nodes: Annotated[str, typer.Option(help="Prefill and decode instances, as 8+8.")] = "8+8",
    speed: Annotated[float, typer.Option(help="Requests come so many times as fast.")] = 1.0,
    admission: Annotated[str, typer.Option(help="off, baseline, early or predict.")] = "off",
    cache: Annotated[
        str, typer.Option(help="What caches evict: lru, lfu, fifo, s3fifo, length_aware, survival.")
    ] = "lru",
    nic: Annotated[float, typer.Option(help="Gbit/s of a node.")] = 320.0,
    seed: Annotated[int, typer.Option(help="Same seed, same numbers.")] = 0,
    limit: Annotated[int | None, typer.Option(help="First so many requests.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Play a trace and show what became of its requests."""
    import msgspec

    from moonpool.conductor.caches import NAMES
    from moonpool.conductor.simulate.case import Case
    from moonpool.conductor.simulate.parallel import play as play_case
    from moonpool.conductor.simulate.parallel import trace_of

    _one_of("--admission", admission, ("off", "baseline", "early", "predict"))
    _one_of("--cache", cache, NAMES)
    prefill, decode = split(nodes)
    case = Case(
        trace=str(trace),
        policy=policy,
        prefill=prefill,
        decode=decode,
        speed=speed,
        admission=admission,
        cache=cache,
        nic_gbit_s=nic,
        seed=seed,
        limit=limit,
    )
    with _progress() as bar:
        task = bar.add_task(trace.name, total=len(trace_of(case).arrivals))
        summary = play_case(case, lambda done: bar.update(task, completed=done))
    if as_json:
        print(msgspec.json.encode(summary).decode())
    else:
        _show(case, summary)


@app.command()
def tables(
    traces: Annotated[Path, typer.Option(help="Folder with conversation_trace.jsonl and synthetic_trace.jsonl.")],
    out: Annotated[Path, typer.Option(help="CSV and PNG files go here.")] = Path("build/simulate"),
    processes: Annotated[int, typer.Option(help="Runs at a time; 0: one for each CPU.")] = 0,
    figures: Annotated[Path | None, typer.Option(help="Key figures, as JSON.")] = None,
) -> None:
    """Make the Mooncake papers' tables from published traces, their rows beside ours."""
    import json
    import sys

    from rich.console import Console

    from moonpool.conductor.simulate import plots, report

    found = report.find_traces(traces)
    with _progress() as bar:

        def started(total: int) -> report.Done:
            task = bar.add_task("simulating", total=total)
            return lambda: bar.advance(task)

        made = report.make(found, processes or os.cpu_count() or 1, started)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for table in made.tables:
        console.print(table.rich())
        console.print()
    written = [*report.write_csv(made, out), *plots.draw_all(made, out)]
    numbers = report.figures(made)
    if figures is not None:
        figures.parent.mkdir(parents=True, exist_ok=True)
        figures.write_text(json.dumps(numbers, indent=2) + "\n")
    for name, value in numbers.items():
        console.print(f"{name}: {value:.4f}")
    console.print(f"{len(written)} files in {out}")


def split(nodes: str) -> tuple[int, int]:
    """`8+8` as two numbers. Raises ConfigError."""
    prefill, plus, decode = nodes.partition("+")
    if not (plus and prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)):
        raise ConfigError("not a number of instances", key="--nodes", need="prefill+decode, as 8+8", have=nodes)
    return int(prefill), int(decode)


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError("no such choice", key=option, need=", ".join(known), have=value)


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _show(case: Case, run: Summary) -> None:
    from rich.console import Console

    from moonpool.conductor.simulate.table import Table, Value

    t = run.ttft
    rows: list[tuple[Value, ...]] = [
        ("requests", run.requests),
        (
            "done, refused, refused after prefill, failed",
            f"{run.done}, {run.refused}, {run.refused_after}, {run.failed}",
        ),
        ("time to first token, mean", t.mean),
        ("  median, p90, p99", f"{t.median:.2f}, {t.p90:.2f}, {t.p99:.2f}"),
        (f"within {case.slo.ttft_s:g} s", run.within_ttft),
        ("within both limits", run.good),
        ("time between tokens, mean of the slowest tenth, p90", run.tbt.p90),
        ("share of tokens found in caches", run.hit),
        ("prefill of a request, node s", run.prefill_s),
        ("prefill for nothing, node s", run.wasted_s),
        ("correlation of both pools' load", run.correlation),
        ("busiest prefill instance to the mean", run.busiest),
        ("median error of predicted time to first token", run.prediction_error),
    ]
    title = f"{Path(case.trace).name}, {case.policy}, {case.prefill}P + {case.decode}D, {case.speed:g}x"
    Console(width=100).print(Table("run", title, ("", "seconds or share"), rows).rich())
