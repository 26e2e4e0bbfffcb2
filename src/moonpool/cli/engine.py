"""Engine and conversion: demo, the whole system in one process, one converter, one instance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moonpool.cli.joining import Master, OptionalMaster
from moonpool.errors import ConfigError
from moonpool.ops import ports
from moonpool.store.base import KVPool


def add_to(app: typer.Typer) -> None:
    for command in (demo, up, converter, serve):
        app.command()(command)


def demo(
    source: Annotated[str, typer.Option(help="Model folder or name: prefills the prompt.")] = "moon-large",
    target: Annotated[str, typer.Option(help="Model folder or name: answers from converted pages.")] = "moon-small",
    bundle: Annotated[Path | None, typer.Option(help="Projector bundle; found or fitted if not given.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of each document.", min=64)] = 448,
    documents: Annotated[int, typer.Option(help="Documents with eight questions each.", min=1)] = 4,
) -> None:
    """One model's prefill serves another model: the main job, measured, with its controls."""
    from moonpool.demo import run_demo

    run_demo(source, target, bundle, tokens=tokens, documents=documents)


def up(
    config: Annotated[Path | None, typer.Argument(help="System file; the bundled pair if not given.")] = None,
    host: Annotated[str | None, typer.Option(help="Overrides the file.")] = None,
    port: Annotated[int | None, typer.Option(help="Overrides the file.", min=0, max=65535)] = None,
) -> None:
    """Start pool, converter and instances on this machine and serve the OpenAI API until Ctrl-C."""
    from moonpool.wire.address import host_only

    host = None if host is None else host_only(host)  # before torch is loaded, which takes seconds
    from moonpool.system import run_system

    run_system(config, host, port)


def converter(
    master: OptionalMaster = "",
    mooncake: Annotated[
        Path | None, typer.Option(help="Settings of a Mooncake cluster to convert in, instead of a pool of ours.")
    ] = None,
    c2c: Annotated[
        Path | None, typer.Option(help="C2C file; with --mooncake only, a master of ours has its own.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Of each matrix product.")] = 1,
) -> None:
    """Run the converter of a pool, or of an existing Mooncake cluster, as a process of its own."""
    if bool(master) == bool(mooncake) or bool(mooncake) != bool(c2c):
        raise ConfigError("whose converter?", need="--master ADDRESS, or --mooncake FILE with --c2c FILE")
    from moonpool.c2c.process import convert_until_stopped

    with _pool_to_convert(master, mooncake, c2c) as pool:
        convert_until_stopped(pool, threads)


def _pool_to_convert(master: str, mooncake: Path | None, c2c: Path | None) -> KVPool:
    if mooncake and c2c:
        from moonpool.c2c.config import load_c2c
        from moonpool.store.mooncake import MooncakePool

        return MooncakePool.connect(mooncake, c2c_config=load_c2c(c2c).encode())
    from moonpool.store.client import PoolClient
    from moonpool.wire.auth import security_from_environment

    return PoolClient.connect(master, security=security_from_environment())


def serve(
    model: Annotated[str, typer.Argument(help="Model folder or name.")],
    master: Master,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = ports.ENGINE,
    api_key: Annotated[str, typer.Option(envvar="MOONPOOL_API_KEY", show_envvar=True, show_default=False)] = "",
) -> None:
    """Run one instance of the built-in engine on a pool."""
    from moonpool.wire.address import host_only

    host = host_only(host)
    from moonpool.system import run_instance

    run_instance(model, master, host, port, api_key)
