"""The command line. Heavy modules are imported by the command that needs them, so that `moonpool --help` is quick."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from moonpool import telemetry
from moonpool.c2c.commands import app as c2c_app
from moonpool.cli import admin, conductor, engine, pool, rules, simulate
from moonpool.errors import MoonpoolError

app = typer.Typer(
    help="One pool of KV caches, shared by engines, machines and models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def common(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False,
    log_format: Annotated[telemetry.Format, typer.Option(envvar="MOONPOOL_LOG_FORMAT", help="text or json")] = "text",
    log_level: Annotated[
        telemetry.Level, typer.Option(envvar="MOONPOOL_LOG_LEVEL", help="Least that is logged.")
    ] = "warning",
) -> None:
    from moonpool.ops.settings import check_environment

    check_environment(os.environ)
    telemetry.configure(log_format, "info" if verbose and log_level == "warning" else log_level)


pool.add_to(app)
admin.add_to(app)
engine.add_to(app)
conductor.add_to(app)
rules.add_to(c2c_app)
app.add_typer(c2c_app, name="c2c")
app.add_typer(simulate.app, name="simulate")


def main() -> None:
    """Entry point: an expected error is one line on stderr and exit status 2."""
    try:
        app()
    except MoonpoolError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
