"""Plain data of a messenger's state: its limits, what is being written, what it gives out and must tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from moonpool.store.messenger.objects import Object


@dataclass(frozen=True, slots=True)
class Limits:
    high_watermark: float = 0.95
    """Share of the segment above which a put evicts first."""
    eviction_ratio: float = 0.05
    """Share of the segment that such an eviction frees beyond the watermark, so that not every put evicts."""
    reservation_ttl_s: float = 60.0
    """A writer that has not committed by then loses its key to the next writer."""
    changes_kept: int = 1 << 16
    """Most changes kept for the master's index; past that the index is told everything anew. 0 where there is no index."""
    max_objects: int = 1 << 20
    """Bounds the tables' own memory, which small objects would otherwise fill without end."""
    max_soft_pin_s: float = 24 * 3600.0
    """Longest soft pin; a longer one is cut to this."""


class Backing(Protocol):
    """What lies in the tier below: only whether, and how large."""

    def __contains__(self, key: str) -> bool: ...

    def size(self, key: str) -> int | None: ...


class NoBacking:
    """There is no tier below."""

    def __contains__(self, key: str) -> bool:
        return False

    def size(self, key: str) -> int | None:
        return None


@dataclass(slots=True, eq=False)
class Writing:
    obj: Object
    expires: float
    lost: bool = False
    """Another writer took the key. The space stays in quarantine until this one commits, revokes or dies: it may be writing."""
    replace: bool = False
    committing: bool = False
    """It will replace in a moment."""

    @property
    def loads(self) -> bool:
        """It brings up what lies below."""
        return self.expires == float("inf")


@dataclass(slots=True)
class Reserved:
    id: int
    offset: int
    size: int


@dataclass(slots=True)
class Row:
    """Space for a whole batch in one piece: ids from `id` on, objects one after the other from `offset` on."""

    id: int
    offset: int


@dataclass(slots=True)
class Changes:
    """What the master's index must be told since the last `take_changes`."""

    there: dict[str, bool] = field(default_factory=dict)
    """Key → whether it is there now."""
    lost: bool = False
    """There were more than were kept: only the whole list of keys tells now."""
