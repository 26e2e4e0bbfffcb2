"""Looking at a pool and steering it: stat, top, drain, quota. Each joins by the master's address."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moonpool.cli.joining import Master
from moonpool.errors import ConfigError, NoSpace

_WIDTH = 120
"""Columns of a table that goes to no terminal."""


def add_to(app: typer.Typer) -> None:
    for command in (stat, top, drain, quota):
        app.command()(command)


def stat(master: Master, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Show each messenger's figures, once."""
    import msgspec
    from rich.console import Console

    from moonpool.ops.picture import Observer
    from moonpool.ops.tables import stat_table
    from moonpool.wire.auth import security_from_environment

    with Observer(master, security_from_environment()) as observer:
        picture = observer.look()
    if as_json:
        print(msgspec.json.encode(picture).decode())
    else:
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(stat_table(picture))


def top(
    master: Master, interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1, max=3600)] = 1.0
) -> None:
    """Show what goes on, until q or Ctrl-C: rates per second of each messenger."""
    from rich.console import Console

    from moonpool.ops import top as live
    from moonpool.ops.picture import Observer
    from moonpool.wire.auth import security_from_environment

    with Observer(master, security_from_environment()) as observer, live.keyboard() as wait:
        live.watch(observer, Console(), wait, interval)


def drain(
    name: Annotated[str, typer.Argument(help="Messenger.")],
    master: Master,
    undo: Annotated[bool, typer.Option("--undo", help="Let it take new objects again.")] = False,
) -> None:
    """Empty a messenger before it is stopped: no new puts there, and all that it holds moves to the others."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from moonpool.ops.emptying import Emptying
    from moonpool.wire.auth import security_from_environment

    with Emptying(master, name, security_from_environment()) as emptying:
        emptying.stop_puts(not undo)
        if undo:
            print(f"{name} takes new objects again")
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(f"emptying {name}", total=emptying.held())
            report = emptying.run(lambda r: bar.update(task, completed=r.nbytes))
    if not report.empty:
        reasons = [f"{count} objects: {why}" for why, count in sorted(report.failed.items())]
        reasons += [f"{report.writing} writes are still open"] if report.writing else []
        fix = f"Run it again, or stop it all the same: what is left will miss. `moonpool drain {name} --undo` takes it back."
        raise NoSpace("not empty", key=name, have="; ".join(reasons), fix=fix)
    print(f"{name} is empty ({report.moved:,} objects moved, {report.nbytes:,} B) and may be stopped")


def quota(
    master: Master,
    tenant: Annotated[str | None, typer.Argument(help="Whose; all if not given.")] = None,
    limit: Annotated[str | None, typer.Argument(help="Bytes, or such as 4GiB; `none` lifts the limit.")] = None,
) -> None:
    """Show what tenants hold and may hold, or set one tenant's limit: until the master restarts with its own settings."""
    from moonpool.config import to_bytes
    from moonpool.wire import messages as m
    from moonpool.wire.auth import security_from_environment
    from moonpool.wire.rpc import SocketChannel

    channel = SocketChannel(master, 5.0, security=security_from_environment())
    try:
        if tenant is not None and limit is not None:
            check_tenant(tenant)
            channel.call(m.SetQuota(tenant, None if limit == "none" else to_bytes(limit, tenant)), m.Done)
        for name, (most, used) in channel.call(m.GetQuotas(), m.Quotas).tenants.items():
            if tenant in (None, name):
                print(f"{name or '(default)'}: {used:,} B of {'no limit' if most < 0 else f'{most:,} B'}")
    finally:
        channel.close()


def check_tenant(tenant: str) -> None:
    """Raises ConfigError for what the wire would refuse."""
    import msgspec

    from moonpool.wire.messages import Tenant

    try:
        msgspec.convert(tenant, Tenant)
    except msgspec.ValidationError as e:
        raise ConfigError(f"not a tenant's name: {e}", key=repr(tenant)) from e
