"""What the disk tier is told, and what it tells."""

from __future__ import annotations

import msgspec


class DiskConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One messenger's folder on disk."""

    folder: str
    """Made if missing. One messenger at a time owns it; nothing else may lie in it."""
    capacity: int
    """Bytes that the folder may take, everything in it counted, at any moment."""
    fsync: bool = True
    """A write or remove that was acknowledged survives a power cut. Without it, it survives the end of the process only."""
    layout: str = ""
    """Names how the caller lays bytes out. Records of another layout miss, and are removed at the next start."""


class DiskStats(msgspec.Struct, frozen=True, kw_only=True):
    """Figures at one moment; counters since `open`."""

    capacity: int
    bytes: int
    """What is taken of `capacity`: records, temporary files, folders, and files that could not be removed."""
    objects: int
    writes: int
    bytes_written: int
    write_failures: int
    failures: dict[str, int]
    """`write_failures` by reason: an errno's name, "too large", or "no room" (all that could go is being read)."""
    reads: int
    bytes_read: int
    misses: int
    read_failures: int
    """Reads that failed for want of descriptors or memory: the entry is still there."""
    evicted: int
    removed: int
    remove_failures: int
    """Files that could not be unlinked (each try counts), and folders that could not be synced after it."""
    damaged: int
    """Entries dropped because they were not what had been written."""
    dropped: dict[str, int]
    """Entries dropped, by reason: "vanished", "truncated", "header", "payload", "other key", an errno's name; and those that are
    not damaged but of no use, "other version" and "other layout"."""
    left_behind: int
    """Files that could not be removed. They count in `bytes`; removing them is tried again."""
