"""`docs/conversion.md` says what the code does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import typer

from moonpool.c2c.config import C2CFile, check
from moonpool.c2c.fitting.capture import KV
from moonpool.c2c.gate import Thresholds
from moonpool.c2c.judging.arms import COMPARE, MAPPED, Case, Mapper, arms
from moonpool.c2c.projectors.identity import IdentityParameters, IdentityProjector
from moonpool.cli import app
from moonpool.config import parse
from tests.c2c.pairs import PAGE, spec

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "conversion.md").read_text()
PAIR = re.findall(r'^    PAIR="(.*)"$', TEXT, re.MULTILINE)[0]
COMMANDS = [c.rstrip("& ").replace("$PAIR", PAIR) for c in re.findall(r"^    moonpool (.*)$", TEXT, re.MULTILINE)]


def rows(head: str) -> list[list[str]]:
    """Cells of the table whose head begins so."""
    found = re.search(rf"^\| {re.escape(head)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    assert found, head
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in found[1].splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_and_their_options_are_there(command: str) -> None:
    found: Any = typer.main.get_command(app)
    words = shlex.split(command)
    while hasattr(found, "commands"):
        found = found.commands[words.pop(0)]
    found.make_context(found.name, words)  # parses, and runs nothing
    for folder in re.findall(r"--text (\S+)", command):
        assert list((ROOT / folder).glob("*.py"))


def test_options_of_eval_are_there() -> None:
    command: Any = typer.main.get_command(app)
    options = {o for p in command.commands["c2c"].commands["eval"].params for o in p.opts}
    named = {flag for row in rows("option of eval") for flag in re.findall(r"--[a-z-]+", row[0])}
    assert len(named) >= 7
    assert named <= options


def test_the_arms_are_those_of_the_code() -> None:
    one = spec()
    shape = (3 * PAGE, one.num_layers, one.num_kv_heads, one.head_dim)
    kv = KV(torch.zeros(shape), torch.zeros(shape)).rounded()
    same = IdentityProjector(IdentityParameters(layers=one.num_layers, width=one.num_kv_heads * one.head_dim))
    mappers = {name: Mapper(same, one, one, PAGE) for name in (MAPPED, COMPARE)}
    assert [row[0].strip("`") for row in rows("arm")] == [a.name for a in arms(Case(kv, kv, kv, kv), mappers, PAGE, 0)]


def test_the_thresholds_are_those_of_the_code() -> None:
    documented = {row[0].strip("`"): float(row[1]) for row in rows("threshold")}
    assert documented == {k: v for k, v in msgspec.structs.asdict(Thresholds()).items() if k != "demand"}
    assert Thresholds().demand == tuple(list(documented)[:-2]), "all but the last two"


def test_its_rule_is_valid() -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    check(parse(text.encode(), C2CFile, name="c2c.yaml"), name="c2c.yaml")
