"""Typer commands whose options come from a table of settings, with the defaults that the code has."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from moonpool import telemetry
from moonpool.ops.settings import MasterSettings, MessengerSettings, Option, resolve

S = TypeVar("S", MasterSettings, MessengerSettings)


def configured(
    app: typer.Typer, name: str, kind: type[S], options: Sequence[Option], run: Callable[[S], None], doc: str
) -> None:
    """Add the command `name`: settle the settings, set up logs, `run`."""

    def command(**given: Any) -> None:
        file: Path | None = given.pop("config")
        settings = resolve(kind, options, file, os.environ, given)
        telemetry.configure(settings.log_format, settings.log_level)
        run(settings)

    file = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings as YAML or JSON.")],
    )
    parameters = [file, *(_parameter(kind, o) for o in options)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    app.command(name, help=doc)(command)


def _parameter(kind: type[msgspec.Struct], option: Option) -> inspect.Parameter:
    field = field_of(kind, option.path)
    switch = field.type is bool
    names = [f"{option.flag}/--no-{option.flag.removeprefix('--')}"] if switch else [option.flag]
    default = default_of(field)
    text = f"{option.help} (default: {default})" if default not in (None, "", {}) else option.help
    annotation = Annotated[bool | None if switch else str | None, typer.Option(*names, help=text, show_default=False)]  # type: ignore[valid-type]
    return inspect.Parameter(option.parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def field_of(kind: type[msgspec.Struct], path: str) -> msgspec.structs.FieldInfo:
    """The field at a dotted path, through structs that may be optional."""
    name, _, rest = path.partition(".")
    field = next(f for f in msgspec.structs.fields(kind) if f.name == name)
    if not rest:
        return field
    below = [t for t in (field.type, *getattr(field.type, "__args__", ())) if isinstance(t, type)]
    return field_of(next(t for t in below if issubclass(t, msgspec.Struct)), rest)


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    """None if it must be given."""
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.NODEFAULT else field.default
