"""`moonpool conductor`: the scheduler in front of instances."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moonpool.ops import ports


def add_to(app: typer.Typer) -> None:
    app.command()(conductor)


def conductor(
    config: Annotated[
        Path | None, typer.Argument(help="Conductor file; without one, instances register themselves.")
    ] = None,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = ports.CONDUCTOR,
    instance: Annotated[list[str] | None, typer.Option(help="MODEL=URL of an instance; repeat.")] = None,
    policy: Annotated[str | None, typer.Option(help="Overrides the file.")] = None,
    api_key: Annotated[str, typer.Option(envvar="MOONPOOL_API_KEY", show_envvar=True, show_default=False)] = "",
) -> None:
    """Schedule requests over instances by what they have cached: OpenAI-compatible, in front of any engine."""
    from msgspec.structs import replace

    from moonpool.conductor.config import ConductorConfig, load
    from moonpool.conductor.registry import InstanceEntry
    from moonpool.conductor.server.run import serve
    from moonpool.errors import ConfigError
    from moonpool.wire.address import host_only

    found = load(config) if config else ConductorConfig()
    more = []
    for text in instance or []:
        model, separator, url = text.partition("=")
        if not separator:
            raise ConfigError("not an instance", key=text, need="MODEL=URL")
        more.append(InstanceEntry(url=url, model=model))
    found = replace(found, instances=[*found.instances, *more], policy=policy or found.policy)
    serve(found, host_only(host), port, api_key)
