"""A table of a report: numbers with the paper's beside them and the difference. Text, CSV."""

from __future__ import annotations

import csv
import io
from typing import TypeAlias

import msgspec
from rich.table import Table as RichTable

Value: TypeAlias = str | int | float | None
_DIGITS = 4


class Table(msgspec.Struct, frozen=True):
    """`rows` are as long as `columns`. None prints as nothing: the paper has no such figure."""

    name: str
    """Of its CSV file."""
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Value, ...]]
    note: str = ""

    def csv(self) -> str:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([text(v) for v in row] for row in self.rows)
        return out.getvalue()

    def rich(self) -> RichTable:
        table = RichTable(title=self.title, title_justify="left", caption=self.note or None, caption_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in self.rows:
            table.add_row(*(text(v) for v in row))
        return table


def text(value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        digits = _DIGITS if abs(value) < 1 else 2
        return f"{value:.{digits}f}"
    return str(value)


def difference(ours: float, paper: float | None) -> float | None:
    return None if paper is None else ours - paper


def beside(ours: float, paper: float | None) -> tuple[Value, Value, Value]:
    """Our figure, the paper's, ours less the paper's."""
    return ours, paper, difference(ours, paper)
