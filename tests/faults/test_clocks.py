"""A clock that jumps changes nothing: what the pool decides by time, it decides by the monotonic clock."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import moonpool

_PACKAGES = ("store", "transfer", "wire")
_WALL = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "datetime.now", "datetime.utcnow", "date.today"}
_DISK = "store/messenger/disk"
"""The files' mtime, which is wall time, orders what is evicted after a restart; it never says what is good."""


def sources() -> list[Path]:
    root = Path(moonpool.__file__).parent
    return [path for package in _PACKAGES for path in sorted((root / package).rglob("*.py"))]


def wall_clocks(path: Path) -> list[str]:
    """Uses of the wall clock in a source, by name and line; also under another name (`from time import time`)."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if f"{owner}.{node.attr}" in _WALL:
                found.append(f"{path.name}:{node.lineno} {owner}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            names = [a.name for a in node.names if f"{node.module}.{a.name}" in _WALL or node.module == "datetime"]
            found += [f"{path.name}:{node.lineno} from {node.module} import {name}" for name in names]
    return found


def test_nothing_in_the_pool_asks_for_the_time_of_day() -> None:
    paths = sources()
    assert len(paths) > 40, "all of the pool's sources"
    assert [use for path in paths if _DISK not in str(path) for use in wall_clocks(path)] == []


@pytest.mark.parametrize(
    "use", ["import time\ntime.time()", "from time import time\ntime()", "import datetime\ndatetime.datetime.now()"]
)
def test_a_use_would_be_found(tmp_path: Path, use: str) -> None:
    (tmp_path / "x.py").write_text(use)
    assert wall_clocks(tmp_path / "x.py")
