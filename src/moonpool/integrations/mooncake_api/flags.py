"""Command lines as the peer's programs take them: `--name=value`, `--name value`, `-name=value`, `--switch`, `--noswitch`."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from moonpool.errors import ConfigError
from moonpool.integrations.mooncake_api.config import parse_bool, parse_size

log = logging.getLogger(__name__)

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Flag(NamedTuple):
    """One that has a meaning. `parse` raises ValueError; `switch`: may stand without a value."""

    default: Any
    parse: Callable[[str], Any] = str
    switch: bool = False


def switch(default: bool = False) -> Flag:
    return Flag(default, parse_bool, switch=True)


def number(default: int) -> Flag:
    return Flag(default, int)


def size(default: int) -> Flag:
    return Flag(default, parse_size)


def duration(text: str) -> float:
    """Seconds of `5s`, `30m`, `10000ms`; a bare number is seconds. Raises ValueError."""
    found = _DURATION.fullmatch(text.strip())
    if not found:
        raise ValueError(f"not a duration: {text!r}")
    return float(found[1]) * _SECONDS[found[2] or "s"]


def parse(arguments: Sequence[str], known: Mapping[str, Flag], idle: frozenset[str]) -> dict[str, Any]:
    """The values of `known` flags. Those in `idle` are the peer's and mean nothing here: taken, with one line in the log.

    `--config_path FILE` (YAML or JSON) gives values that the command line overrides. Raises ConfigError; for an unknown flag it
    names the nearest known one.
    """
    given = _pairs(arguments, known, idle)
    path = given.pop("config_path", "")
    if path:
        given = _file(path, known, idle) | given
    unused = sorted(name for name in given if name in idle)
    if unused:
        log.info("without meaning here: %s", ", ".join(f"--{name}={given[name]}" for name in unused))
    values = {name: flag.default for name, flag in known.items()}
    for name, text in given.items():
        if name in known:
            try:
                values[name] = known[name].parse(text)
            except (ValueError, TypeError) as e:
                raise ConfigError(f"bad value: {e}", key=f"--{name}", have=repr(text)) from e
    return values


def _pairs(arguments: Sequence[str], known: Mapping[str, Flag], idle: frozenset[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or not word.strip("-"):
            raise ConfigError("not a flag", key=word, fix="Write --name=value.")
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name not in known and name not in idle and name != "config_path":
            off = name.removeprefix("no")
            if not (off != name and off in known and known[off].switch) and not (off != name and off in idle):
                raise _unknown(name, known, idle)
            name, equals, value = off, "=", "false"
        if not equals:
            value = _value(name, rest, known)
        given[name] = value
    return given


def _value(name: str, rest: list[str], known: Mapping[str, Flag]) -> str:
    """What follows a flag that stands without `=`; a switch takes nothing."""
    if name in known and known[name].switch:
        return "true"
    if rest and not rest[0].startswith("-"):
        return rest.pop(0)
    if name in known or name == "config_path":
        raise ConfigError("has no value", key=f"--{name}", fix=f"Write --{name}=VALUE.")
    return "true"


def _file(path: str, known: Mapping[str, Flag], idle: frozenset[str]) -> dict[str, str]:
    try:
        found = msgspec.yaml.decode(Path(path).read_bytes(), type=dict[str, str | int | float | bool | None])
    except (OSError, msgspec.DecodeError) as e:
        raise ConfigError(f"cannot be read: {e}", key=f"--config_path={path}") from e
    for name in found:
        if name not in known and name not in idle:
            raise _unknown(name, known, idle)
    return {name: str(value) for name, value in found.items() if value is not None}


def _unknown(name: str, known: Mapping[str, Flag], idle: frozenset[str]) -> ConfigError:
    near = difflib.get_close_matches(name, [*known, *idle], n=1)
    return ConfigError("unknown flag", key=f"--{name}", fix=f"Did you mean --{near[0]}?" if near else "Remove it.")
