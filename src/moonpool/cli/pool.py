"""The pool's own processes: master, messenger, metadata server."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.cli.settings import configured
from moonpool.ops import ports
from moonpool.ops.settings import MASTER, MESSENGER, MasterSettings, MessengerSettings


def add_to(app: typer.Typer) -> None:
    configured(
        app,
        "master",
        MasterSettings,
        MASTER,
        _master,
        "Run the master: the index of the pool, and the holder of its C2C config.",
    )
    configured(
        app, "messenger", MessengerSettings, MESSENGER, _messenger, "Run a messenger: owner of this node's segment."
    )
    app.command()(metadata)


def _master(settings: MasterSettings) -> None:
    from moonpool.ops.serving import serve_master

    serve_master(settings)


def _messenger(settings: MessengerSettings) -> None:
    from moonpool.ops.serving import serve_messenger

    serve_messenger(settings)


def metadata(
    host: Annotated[str, typer.Option(help="Loopback, or see --trust-network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = ports.METADATA,
    trust_network: Annotated[
        bool,
        typer.Option(
            "--trust-network", help="The protocol has no authentication; listen beyond loopback all the same."
        ),
    ] = False,
) -> None:
    """Run the HTTP metadata server that Mooncake's TransferEngine speaks to."""
    from moonpool.store.metadata.server import run_metadata
    from moonpool.wire.address import host_only

    run_metadata(host_only(host), port, trust_network=trust_network)
