"""The one config loader: YAML or JSON text into a typed struct, unknown names refused, paths expanded by the owner.

It knows no component. Each package defines its own `msgspec.Struct(forbid_unknown_fields=True)` and calls `load`.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TypeVar

import msgspec

from moonpool.errors import ConfigError

MAX_CONFIG_BYTES = 1 << 20

T = TypeVar("T", bound=msgspec.Struct)


def load(path: str | Path, kind: type[T]) -> T:
    """Read a YAML (or JSON) file as `kind`. Raises ConfigError that names the file and the place in it."""
    try:
        raw = Path(path).read_bytes()
    except OSError as e:
        raise ConfigError("cannot read the file", key=str(path), have=e.strerror or str(e)) from e
    return parse(raw, kind, name=str(path))


def parse(raw: bytes, kind: type[T], *, name: str = "config") -> T:
    """Text as `kind`; `name` stands in the error."""
    if len(raw) > MAX_CONFIG_BYTES:
        raise ConfigError("too large", key=name, need=f"<= {MAX_CONFIG_BYTES} B", have=f"{len(raw)} B")
    try:
        return msgspec.yaml.decode(raw, type=kind)
    except msgspec.ValidationError as e:
        raise ConfigError(str(e), key=name, fix=_suggestion(str(e), kind)) from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"not valid YAML: {e}", key=name, fix="Mend the syntax at the place named.") from e


def _suggestion(message: str, kind: type[msgspec.Struct]) -> str:
    unknown = re.search(r"unknown field `([^`]+)`", message)
    if not unknown:
        return ""
    close = difflib.get_close_matches(unknown[1], sorted(_names(kind, set())), n=1)
    return f"Did you mean `{close[0]}`?" if close else "Remove it."


def _names(kind: type[msgspec.Struct], seen: set[type]) -> set[str]:
    if kind in seen:
        return set()
    seen.add(kind)
    names: set[str] = set()
    for field in msgspec.structs.fields(kind):
        names.add(field.encode_name)
        for part in _structs_in(field.type):
            names |= _names(part, seen)
    return names


def _structs_in(annotation: object) -> list[type[msgspec.Struct]]:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return [annotation]
    return [s for arg in getattr(annotation, "__args__", ()) for s in _structs_in(arg)]
