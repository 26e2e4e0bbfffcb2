"""Plain data that several packages speak of. No behaviour; imports only the error tree."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import msgspec

from moonpool.errors import MoonpoolError

BufferLike: TypeAlias = Any
"""Anything that answers the C buffer protocol (bytes, memoryview, numpy array), or a contiguous CPU torch tensor.
Python 3.11 has no type for it; `store.base.as_bytes_view` is the one place that turns it into a memoryview."""


class Put(Enum):
    """What became of a put that did not fail."""

    STORED = "stored"
    EXISTED = "existed"
    """The key was there already. Objects are immutable, so this is success."""


PutOutcome: TypeAlias = Put | MoonpoolError


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """An object became visible."""

    key: str
    size: int


class Missed(msgspec.Struct, frozen=True, tag="missed"):
    """A lookup that would have taken a converted page found nothing for this native key."""

    key: str


class Hinted(msgspec.Struct, frozen=True, tag="hinted"):
    """Somebody expects this native key to be wanted soon."""

    key: str


PoolEvent: TypeAlias = Stored | Missed | Hinted


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    """A messenger's (or a whole pool's) figures at one moment; bytes unless the name says otherwise."""

    capacity: int = 0
    used: int = 0
    largest_free: int = 0
    objects: int = 0
    converted_objects: int = 0
    reads_open: int = 0
    writes_open: int = 0
    puts: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    revoked: int = 0
    events_dropped: int = 0


@dataclass(frozen=True, slots=True)
class PageShape:
    """Shape of one page in the canonical layout: two halves (K, V), each `[tokens, layers, heads, dim]`."""

    tokens: int
    layers: int
    heads: int
    dim: int
    itemsize: int = 2

    @property
    def width(self) -> int:
        """Numbers of one token in one layer of one half: `heads * dim`."""
        return self.heads * self.dim

    @property
    def nbytes(self) -> int:
        return 2 * self.tokens * self.layers * self.width * self.itemsize
