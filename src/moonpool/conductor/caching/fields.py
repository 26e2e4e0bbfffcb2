"""Checks of what a client sends, as every one of the APIs needs them. All raise RequestError with the field's name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from moonpool.errors import RequestError

Body = dict[str, Any]


def decoded(raw: bytes) -> Body:
    try:
        found = msgspec.json.decode(raw or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise RequestError(f"the body is not JSON: {e}") from e
    if not isinstance(found, dict):
        raise RequestError("the body is no JSON object")
    return found


def text(body: Mapping[str, Any], name: str, longest: int, *, needed: bool = False) -> str:
    """Length in characters. Null is absent."""
    found = body.get(name)
    if found is None and not needed:
        return ""
    if not isinstance(found, str) or (needed and not found):
        raise RequestError("must be a string" if found else "is missing", key=name)
    if len(found) > longest:
        raise RequestError("too long", key=name, need=f"<= {longest} characters", have=str(len(found)))
    return found


def objects(body: Mapping[str, Any], name: str, *, needed: bool = False) -> list[dict[str, Any]]:
    found = body.get(name)
    if found is None and not needed:
        return []
    if not isinstance(found, list) or not all(isinstance(f, dict) for f in found):
        raise RequestError("must be a list of objects", key=name)
    if needed and not found:
        raise RequestError("must not be empty", key=name)
    return found


def pairs(found: Any, name: str = "metadata", most: int = 16, key: int = 64, value: int = 512) -> dict[str, str]:
    """At most so many, of so many characters."""
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise RequestError("must be an object of strings", key=name)
    if len(found) > most:
        raise RequestError("too many entries", key=name, need=f"<= {most}", have=str(len(found)))
    for k, v in found.items():
        if not k or len(k) > key:
            raise RequestError("a key is empty or too long", key=name, need=f"1 to {key} characters", have=str(len(k)))
        if len(v) > value:
            raise RequestError("too long", key=f"{name}.{k}", need=f"<= {value} characters", have=str(len(v)))
    return dict(found)


def number(found: Any, name: str, low: float, high: float) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise RequestError("must be a number", key=name)
    if not low <= found <= high:
        raise RequestError("out of range", key=name, need=f"{low:g} to {high:g}", have=f"{found:g}")
    return float(found)


def whole(given: str, name: str, low: int, high: int) -> int:
    """Of a query or a header."""
    if not given.isascii() or not given.isdigit() or len(given) > 12:
        raise RequestError("must be a whole number", key=name, have=given[:32])
    return int(number(int(given), name, low, high))


def only(body: Mapping[str, Any], names: Sequence[str], why: str) -> None:
    """`names` are all that may be there."""
    if strange := sorted(set(body) - set(names)):
        raise RequestError(why, key=strange[0], need=", ".join(names))
