"""Whose an object is. A tenant's keys live in a namespace of their own: `\\x1f<tenant>\\x1f<key>`; the default
tenant's have no prefix.

The messenger adds the prefix from what the session said of itself, so no key that a client sends reaches into another namespace.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.errors import PoolError

SEPARATOR = "\x1f"


def scoped(tenant: str, keys: Sequence[str]) -> Sequence[str]:
    """Full keys. Raises PoolError for a key that would name a namespace itself."""
    for key in keys:
        if key[0] == SEPARATOR:
            raise PoolError("not a key", key=repr(key[:80]), need="no control character at its start")
    if not tenant:
        return keys
    prefix = f"{SEPARATOR}{tenant}{SEPARATOR}"
    return [prefix + key for key in keys]


def tenant_of(key: str) -> str:
    return key[1:].partition(SEPARATOR)[0] if key[0] == SEPARATOR else ""


def bare(key: str) -> str:
    """The key as its tenant knows it."""
    return key[1:].partition(SEPARATOR)[2] if key[0] == SEPARATOR else key
