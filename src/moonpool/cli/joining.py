"""How commands that join a pool are told where it is. Who they are, the environment says (MOONPOOL_SECRET_FILE and its like)."""

from __future__ import annotations

from typing import Annotated

import typer

Master = Annotated[str, typer.Option(envvar="MOONPOOL_MASTER", help="Address of the master: HOST:PORT, or its socket.")]
OptionalMaster = Annotated[str, typer.Option("--master", envvar="MOONPOOL_MASTER", help="Address of the master.")]
