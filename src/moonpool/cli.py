"""The command line. Heavy modules are imported by the command that needs them, so that `moonpool --help` is quick."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from moonpool.c2c.commands import app as c2c_app
from moonpool.errors import MoonpoolError

app = typer.Typer(
    help="One pool of KV caches, shared by engines, machines and models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(c2c_app, name="c2c")

Socket = Annotated[str, typer.Option(help="Unix socket of this process.")]
Master = Annotated[str, typer.Option(help="Unix socket of the master.")]


@app.callback()
def common(verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(name)s: %(message)s")


@app.command()
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


@app.command()
def up(
    config: Annotated[Path | None, typer.Argument(help="System file; the bundled pair if not given.")] = None,
    host: Annotated[str | None, typer.Option(help="Overrides the file.")] = None,
    port: Annotated[int | None, typer.Option(help="Overrides the file.")] = None,
) -> None:
    """Start pool, converter and instances on this machine and serve the OpenAI API until Ctrl-C."""
    from moonpool.system import run_system

    run_system(config, host, port)


@app.command()
def master(
    socket: Socket,
    c2c: Annotated[Path | None, typer.Option(help="C2C file to hold and to serve.")] = None,
    expiry_s: Annotated[float, typer.Option(help="Silence after which a messenger is taken for dead.")] = 10.0,
) -> None:
    """Run the master: the index of the pool, and the holder of its C2C config."""
    from moonpool import paths
    from moonpool.store.processes import MasterConfig, run_master

    raw = b""
    if c2c:
        from moonpool.c2c.config import load_c2c

        raw = load_c2c(c2c, paths.models_dir() or paths.repo_dir("models")).encode()
    run_master(MasterConfig(socket=socket, expiry_s=expiry_s), raw)


@app.command()
def messenger(
    socket: Socket,
    master: Master = "",
    name: Annotated[str, typer.Option(help="Unique in the pool.")] = "messenger",
    capacity_mib: Annotated[int, typer.Option(help="Size of the segment.", min=1)] = 1024,
) -> None:
    """Run a messenger: owner of this node's segment."""
    from moonpool.store.processes import MessengerConfig, run_messenger

    run_messenger(MessengerConfig(name=name, socket=socket, master=master, capacity=capacity_mib << 20))


@app.command()
def converter(master: Master, threads: Annotated[int, typer.Option(help="Of each matrix product.")] = 1) -> None:
    """Run the converter of a pool as a process of its own."""
    from moonpool.c2c.process import convert_until_stopped
    from moonpool.store.client import PoolClient

    with PoolClient.connect(master) as pool:
        convert_until_stopped(pool, threads)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Model folder or name.")],
    master: Master,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option()] = 8000,
    api_key: Annotated[str, typer.Option(envvar="MOONPOOL_API_KEY")] = "",
) -> None:
    """Run one instance of the built-in engine on a pool."""
    from moonpool.system import run_instance

    run_instance(model, master, host, port, api_key)


def main() -> None:
    """Entry point: an expected error is one line on stderr and exit status 2."""
    try:
        app()
    except MoonpoolError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
