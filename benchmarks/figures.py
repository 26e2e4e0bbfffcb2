"""How every benchmark reports: a table for people, a flat JSON file for machines."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

FOLDER = Path("build/figures")


def write(target: str, figures: Mapping[str, object]) -> Path:
    """Save `figures` as `build/figures/<target>.json`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{target}.json"
    path.write_text(json.dumps(figures, indent=2) + "\n")
    return path


def show(title: str, rows: Sequence[tuple[str, ...]], columns: tuple[str, ...]) -> None:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def seconds(action: Callable[[], object], repeats: int = 5) -> float:
    """Median time of `action` in seconds, after one run that is not counted."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
