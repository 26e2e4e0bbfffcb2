"""`moonpool top`: the pool, live, until q or Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from moonpool.errors import MoonpoolError
from moonpool.ops.picture import Observer, Picture
from moonpool.ops.tables import top_table

_SLICE_S = 0.2

Wait = Callable[[float], bool]
"""Waits so many seconds, or until the user wants the end; true then."""


def watch(observer: Observer, console: Console, wait: Wait, interval_s: float) -> None:
    """Look, show, wait, until the user wants the end. A master that is away is shown as that; the last figures stay."""
    before: Picture | None = None
    now = observer.look()  # a wrong address is an error, not an empty screen
    with Live(top_table(before, now), console=console, auto_refresh=False, transient=False) as live:
        while not wait(interval_s):
            before, now, body = _next(observer, before, now)
            live.update(body, refresh=True)


def _next(observer: Observer, before: Picture | None, now: Picture) -> tuple[Picture | None, Picture, RenderableType]:
    try:
        new = observer.look()
    except MoonpoolError as e:
        return before, now, Group(top_table(before, now), Text(f"the master does not answer: {e}", style="red"))
    return now, new, top_table(now, new)


@contextlib.contextmanager
def keyboard() -> Iterator[Wait]:
    """Waiting that `q` ends, where there is a terminal."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    fd = sys.stdin.fileno()
    was = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield lambda seconds: _quit_within(fd, seconds)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, was)


def _quit_within(fd: int, seconds: float) -> bool:
    """In short waits: a signal that comes just before one is heard only after it."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([fd], [], [], min(left, _SLICE_S))[0] and os.read(fd, 1) in (b"q", b"Q"):
            return True
    return False


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
