"""`moonpool c2c status`, `enable`, `disable`: the conversion rules of a running pool. Each joins by the master's address."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moonpool.cli.joining import Master

Rule = Annotated[str, typer.Argument(help="SOURCE:TARGET, or the beginning of its bundle's digest.")]
_WIDTH = 160
"""Columns of a table that goes to no terminal."""


def add_to(app: typer.Typer) -> None:
    for command in (status, enable, disable):
        app.command()(command)


def status(master: Master, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Show each rule: what the gate made of its bundle, what was answered over its pages, what shadow checks found."""
    import msgspec
    from rich.console import Console

    from moonpool.ops.rules import RuleOffice, rules_table
    from moonpool.wire.auth import security_from_environment

    with RuleOffice(master, security_from_environment()) as office:
        known = office.look()
    if as_json:
        print(msgspec.json.encode(known).decode())
    else:
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(rules_table(known))


def enable(rule: Rule, master: Master) -> None:
    """Serve a rule again that a drift alarm, or somebody, disabled."""
    from moonpool.ops.rules import RuleOffice
    from moonpool.wire.auth import security_from_environment

    with RuleOffice(master, security_from_environment()) as office:
        print(f"{office.enable(rule).name} is enabled")


def disable(
    rule: Rule, master: Master, reason: Annotated[str, typer.Option(help="Shown in the status.")] = "by hand"
) -> None:
    """Stop a rule in the whole cluster: nobody takes or makes pages of its bundle."""
    from moonpool.ops.rules import RuleOffice
    from moonpool.wire.auth import security_from_environment

    with RuleOffice(master, security_from_environment()) as office:
        print(f"{office.disable(rule, reason).name} is disabled")
