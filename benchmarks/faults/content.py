"""What is stored under which key, so that every wrong byte shows: of another key, of another version, or of nothing."""

from __future__ import annotations

import random
import struct
from functools import lru_cache

PLAIN = [f"k{i}" for i in range(150)]
"""Whoever puts one puts the same."""
PINNED = [f"h{i}" for i in range(4)]
VERSIONED = [f"u{i}" for i in range(24)]
"""Replaced again and again; the content says which version it is."""
EVERY = [*PLAIN, *PINNED, *VERSIONED]
TENANTS = ("", "t")

_SIZES = (0, 1, 100, 4096, 65_536, 200_000, 262_144, 1 << 20)
_VERSION = struct.Struct("<Q")


@lru_cache(512)
def plain(key: str) -> bytes:
    r = random.Random(key)
    return r.randbytes(4096 if key in PINNED else r.choice(_SIZES))


def versioned(key: str, version: int) -> bytes:
    r = random.Random(f"{key}/{version}")
    return _VERSION.pack(version) + r.randbytes(r.choice(_SIZES[:-1]))


def whole(tenant: str, key: str) -> str:
    """Tenants have other contents under the same keys."""
    return f"{tenant}:{key}"


def fault_in(tenant: str, key: str, found: bytes) -> str:
    """What is wrong with these bytes; empty if they are good."""
    name = whole(tenant, key)
    if key not in VERSIONED:
        return "" if found == plain(name) else f"{len(found)} B that are not {key}'s {len(plain(name))}"
    if len(found) < _VERSION.size:
        return f"{len(found)} B, too few"
    version = version_of(found)
    return "" if found == versioned(name, version) else f"{len(found)} B that are no version ({version})"


def version_of(found: bytes) -> int:
    version: int = _VERSION.unpack_from(found)[0]
    return version
