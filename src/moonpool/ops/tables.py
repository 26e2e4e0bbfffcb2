"""A picture of the pool as tables for people: one moment (`stat`), or what went on between two (`top`)."""

from __future__ import annotations

from collections.abc import Callable

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moonpool.ops.picture import Picture, Row
from moonpool.types import PoolStats

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """`1.5 GiB`."""
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def stat_table(picture: Picture) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, title=f"{picture.master}: {picture.keys:,} keys", title_justify="left")
    for column in ("messenger", "state"):
        table.add_column(column)
    for column in ("used", "of", "objects", "r/w", "puts", "hits", "evicted", "disk", "on disk", "lost"):
        table.add_column(column, justify="right")
    for row in picture.messengers:
        table.add_row(row.info.name, _state(row), *_moment(row.stats))
    table.add_section()
    table.add_row("all", "", *_moment(picture.total))
    return Group(table, *_quotas(picture))


def top_table(before: Picture | None, now: Picture) -> RenderableType:
    """Rates are per second since `before`."""
    table = Table(box=box.SIMPLE_HEAD, title=f"{now.master}: {now.keys:,} keys", title_justify="left")
    for column in ("messenger", "state"):
        table.add_column(column)
    for column in (
        "used",
        "",
        "objects",
        "r/w",
        "puts/s",
        "hits/s",
        "miss/s",
        "evict/s",
        "disk r/s",
        "disk w/s",
    ):
        table.add_column(column, justify="right")
    old = {row.info.name: row for row in before.messengers} if before else {}
    seconds = now.at - before.at if before else 0.0
    for row in now.messengers:
        table.add_row(row.info.name, _state(row), *_between(_base(old.get(row.info.name), row), row.stats, seconds))
    return Group(table, *_quotas(now))


def _state(row: Row) -> Text:
    if row.stats is None:
        return Text("no answer", style="red")
    return Text("draining", style="yellow") if row.info.draining else Text("serving", style="green")


def _moment(stats: PoolStats | None) -> list[str]:
    if stats is None:
        return ["–"] * 10
    asked = stats.hits + stats.misses
    return [
        size(stats.used),
        size(stats.capacity),
        f"{stats.objects:,}",
        f"{stats.reads_open}/{stats.writes_open}",
        f"{stats.puts:,}",
        f"{100 * stats.hits / asked:.0f} %" if asked else "–",
        f"{stats.evictions:,}",
        size(stats.disk_used),
        f"{stats.disk_objects:,}",
        f"{stats.lost_unspilled:,}",
    ]


def _share(stats: PoolStats) -> str:
    return f"{100 * stats.used / stats.capacity:.0f} %" if stats.capacity else "–"


def _base(old: Row | None, new: Row) -> PoolStats | None:
    """What rates count from: a messenger that was started anew began at 0."""
    if old is None or old.stats is None:
        return None
    return old.stats if old.generation == new.generation else PoolStats()


def _between(old: PoolStats | None, new: PoolStats | None, seconds: float) -> list[str]:
    if new is None:
        return ["–"] * 10

    def rate(of: Callable[[PoolStats], int]) -> str:
        return "–" if old is None or seconds <= 0 else f"{(of(new) - of(old)) / seconds:,.0f}"

    return [
        size(new.used),
        _share(new),
        f"{new.objects:,}",
        f"{new.reads_open}/{new.writes_open}",
        rate(lambda s: s.puts),
        rate(lambda s: s.hits),
        rate(lambda s: s.misses),
        rate(lambda s: s.evictions),
        rate(lambda s: s.disk_reads),
        rate(lambda s: s.disk_writes),
    ]


def _quotas(picture: Picture) -> list[RenderableType]:
    if not picture.quotas:
        return []
    table = Table(box=box.SIMPLE_HEAD, title="tenants", title_justify="left")
    table.add_column("tenant")
    for column in ("limit", "used", ""):
        table.add_column(column, justify="right")
    for q in picture.quotas:
        share = f"{100 * q.used / q.limit:.0f} %" if q.limit else ""
        table.add_row(q.tenant or "(default)", "none" if q.limit is None else size(q.limit), size(q.used), share)
    return [table]
