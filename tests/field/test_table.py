"""The table in README.md: every case once, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
CASES = {
    *(f"A{i}" for i in range(4, 18)),
    *(f"B{i}" for i in range(2, 9)),
    *(f"C{i}" for i in range(3, 12)),
    *(f"D{i}" for i in range(3, 13)),
    *(f"E{i}" for i in range(1, 8)),
    *(f"F{i}" for i in range(2, 11)),
    *(f"G{i}" for i in range(1, 7)),
    *(f"H-{i}" for i in range(1, 6)),
    *(f"I{i}" for i in range(1, 9)),
    *(f"J{i}" for i in range(1, 6)),
    *(f"K{i}" for i in range(1, 6)),
    *(f"L{i}" for i in range(1, 6)),
    *(f"M{i}" for i in range(1, 8)),
    "Q2",
    "Q3",
}
LATER = ("engines' part", "conductor's part")


def rows() -> list[list[str]]:
    lines = (HERE / "README.md").read_text().splitlines()
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| [A-Z]-?\d", line)]
    assert all(len(row) == 3 for row in found)
    return found


def test_every_case_stands_in_the_table_once() -> None:
    assert sorted(row[0] for row in rows()) == sorted(CASES)


def test_every_test_that_is_named_exists() -> None:
    missing = []
    for case, tests, _ in rows():
        if tests in LATER:
            continue
        names = re.findall(r"`([^`]+)`", tests)
        missing += [f"{case}: {name}" for name in names if not exists(name)] if names else [f"{case}: no test"]
    assert not missing


def exists(name: str) -> bool:
    file, _, test = name.partition("::")
    path = HERE.parent / file
    return path.is_file() and (not test or test in defined(path))


def defined(path: Path) -> set[str]:
    """Names of functions and classes, and of what a module assigns (a state machine's test case)."""
    tree = ast.parse(path.read_text())
    functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    assigned = {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    return functions | assigned
