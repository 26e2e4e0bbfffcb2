"""Plain data that several packages speak of. No behaviour; imports only the error tree."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeAlias

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


class Removed(Enum):
    """What became of a removal. Only `REMOVED` is true."""

    REMOVED = "removed"
    MISSING = "missing"
    PINNED = "pinned"
    """Hard-pinned, and the removal was not forced."""

    def __bool__(self) -> bool:
        return self is Removed.REMOVED


class Pin(Enum):
    """How an object stands towards eviction."""

    NONE = "none"
    SOFT = "soft"
    """Evicted only when no unpinned object is left, until its time is up; reading does not extend it."""
    HARD = "hard"
    """Never evicted."""


class PutOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to store. The defaults are a plain put."""

    replicas: int = 1
    """Copies, each on a messenger of its own."""
    strict_replicas: bool = True
    """Too few messengers: NotEnoughMessengers, and nothing is evicted. False: as many copies as there are messengers."""
    preferred: tuple[str, ...] = ()
    """Names of messengers to try first, in this order."""
    pin: Pin = Pin.NONE
    soft_pin_ttl_s: float = 1800.0
    groups: tuple[str, ...] = ()
    """Empty, or one group name per item, "" for none. A group is touched and evicted as a whole."""
    replace: bool = False
    """At the commit the new object takes the place of one that is there, atomically; open reads keep the old bytes."""


class Replica(msgspec.Struct, frozen=True):
    """One copy of an object."""

    messenger: str
    address: str
    """Of the messenger: `host:port`, or its socket's path."""
    size: int
    tier: Literal["memory", "disk"]
    pin: Pin = Pin.NONE
    offset: int = 0
    """In the segment; figures only, since nobody but the messenger may act on it."""


class MessengerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A messenger as the master knows it; the figures are those of its last heartbeat."""

    name: str
    socket: str
    listen: str = ""
    """`host:port` for other machines; empty if it serves this machine only."""
    host: str = ""
    """Equal for messengers and clients that can share memory."""
    capacity: int = 0
    used: int = 0
    objects: int = 0
    draining: bool = False


class TaskStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A copy or move of one object between messengers."""

    id: str
    kind: Literal["copy", "move"]
    key: str
    source: str
    targets: tuple[str, ...]
    state: Literal["pending", "running", "done", "failed"]
    done: int = 0
    """Bytes copied."""
    total: int = 0
    error: str = ""


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
    disk_used: int = 0
    disk_objects: int = 0
    disk_reads: int = 0
    disk_writes: int = 0
    disk_failures: int = 0
    """Writes that failed and reads that found damage: the copy on disk does not exist then."""
    lost_unspilled: int = 0
    """Evicted before the disk tier had a copy."""

    def __add__(self, other: PoolStats) -> PoolStats:
        """Of two messengers together."""
        added = {name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        added["largest_free"] = max(self.largest_free, other.largest_free)
        return PoolStats(**added)


class RuleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What one process has to say of one conversion rule; or, added up, what all of them have. Counts since the process's start."""

    name: str
    digest: str
    """Of the rule's bundle: this is what rules are told apart by."""
    mode: str = ""
    state: str = ""
    """`loading`, `ready` or `refused`; `disabled` where all are added up. Empty from a process that does not load the bundle."""
    gate: str = ""
    """`passed`, `forced` (failed, and served all the same) or `refused`; empty as long as the bundle was not judged."""
    reason: str = ""
    """Why it was refused, would have been, or is disabled; or how far a download is."""
    kl_mean: float = 0.0
    """The report's: what shadow checks are held against. 0: there is none."""
    pages: int = 0
    """Converted."""
    requests: int = 0
    """Answered over its pages."""
    checks: int = 0
    """Of these, checked against the native answer."""
    kl: float = 0.0
    """Sum over the checks: KL(native ‖ converted) of the first token, nats."""
    agreed: int = 0
    """Checks in which both would begin with the same token."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """All that the pool's master knows of its conversion rules."""

    generation: str = ""
    """Of the master; empty: there is none, so nothing is remembered."""
    rules: list[RuleStatus] = []
    """One for each bundle that somebody spoke of, all processes added up."""
    disabled: dict[str, str] = {}
    """Bundle digest → why its pages must not be taken or made."""


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
