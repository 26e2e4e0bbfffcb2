"""The one config loader: YAML or JSON text into a typed struct, unknown names refused, paths expanded by the owner.

It knows no component. Each package defines its own `msgspec.Struct(forbid_unknown_fields=True)` and calls `load`, or `layered` where
environment and flags may say something else than the file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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
    config: T = _decoded(raw, kind, kind, name)
    return config


def _decoded(raw: bytes, type_: Any, kind: type[msgspec.Struct], name: str) -> Any:
    if len(raw) > MAX_CONFIG_BYTES:
        raise ConfigError("too large", key=name, need=f"<= {MAX_CONFIG_BYTES} B", have=f"{len(raw)} B")
    try:
        return msgspec.yaml.decode(raw, type=type_)
    except msgspec.ValidationError as e:
        raise ConfigError(str(e), key=name, fix=_suggestion(str(e), kind)) from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"not valid YAML: {e}", key=name, fix="Mend the syntax at the place named.") from e


class Said(NamedTuple):
    """One value from the environment or a flag."""

    path: str
    """Of the field, `disk.capacity`."""
    value: object
    origin: str
    """What the user wrote it at: the variable, the flag."""


def layered(kind: type[T], file: str | Path | None, said: Collection[Said] = (), *, sizes: Collection[str] = ()) -> T:
    """The file, overridden by what was said, the last word first. Text is taken for what the field wants, from wherever it comes;
    fields in `sizes` also take `4GiB`. A bad value gives the same error from everywhere, after the name of its place.

    Raises ConfigError.
    """
    tree: dict[str, Any] = {}
    if file:
        try:
            raw = Path(file).read_bytes()
        except OSError as e:
            raise ConfigError("cannot read the file", key=str(file), have=e.strerror or str(e)) from e
        tree = _decoded(raw, dict[str, Any] | None, kind, str(file)) or {}
    origins = {path: str(file) for path in ("", *sizes)}
    for one in said:
        _put(tree, one.path.split("."), one.value)
        origins[one.path] = one.origin
    for path in sizes:
        _read_sizes(tree, path.split("."), origins[path])
    try:
        return msgspec.convert(tree, kind, strict=False)
    except msgspec.ValidationError as e:
        what, _, place = str(e).partition(" - at `$")
        place = place.strip("`").lstrip(".")
        known = max((p for p in origins if place == p or place.startswith((f"{p}.", f"{p}["))), key=len, default="")
        fix = _suggestion(what, kind)
        raise ConfigError(f"{place}: {what}" if place else what, key=origins[known], fix=fix) from e


def _put(tree: dict[str, Any], path: list[str], value: object) -> None:
    for name in path[:-1]:
        below = tree.get(name)
        tree[name] = below = dict(below) if isinstance(below, Mapping) else {}
        tree = below
    tree[path[-1]] = value


def _read_sizes(tree: Any, path: list[str], origin: str) -> None:
    """Make bytes of sizes, in place; of all values where the field is a mapping."""

    def read(value: object) -> object:
        return to_bytes(str(value), origin) if isinstance(value, str | int) and not isinstance(value, bool) else value

    for name in path[:-1]:
        tree = tree.get(name) if isinstance(tree, dict) else None
    value = tree.get(path[-1]) if isinstance(tree, dict) else None
    if isinstance(value, dict):
        tree[path[-1]] = {k: read(v) for k, v in value.items()}
    elif value is not None:
        tree[path[-1]] = read(value)


_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", 1):
    _UNITS |= {f"{_prefix}b": 1000**_power, f"{_prefix}i": 1024**_power, f"{_prefix}ib": 1024**_power}


def to_bytes(text: str, name: str = "") -> int:
    """`1048576`, `512MiB`, `4 GiB`, `10GB`. Raises ConfigError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)", text.strip().lower())
    if not found or found[2] not in _UNITS:
        raise ConfigError("not a size", key=name, need="bytes, or such as 512MiB or 4GiB", have=repr(text))
    return int(float(found[1]) * _UNITS[found[2]]) if "." in found[1] else int(found[1]) * _UNITS[found[2]]


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
