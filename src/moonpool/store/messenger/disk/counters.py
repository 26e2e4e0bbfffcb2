"""What happened since `open`, counted. The caller locks."""

from __future__ import annotations

from collections import Counter

from moonpool.store.messenger.disk.config import DiskStats
from moonpool.store.messenger.disk.holdings import Holdings

_USELESS = ("other version", "other layout")
"""Reasons for dropping that are no damage."""


class Counters:
    def __init__(self) -> None:
        self.plain: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()

    def wrote(self, size: int, times: int = 1) -> None:
        """`times=-1` takes it back."""
        self.plain["writes"] += times
        self.plain["bytes_written"] += times * size

    def read(self, size: int) -> None:
        self.plain["reads"] += 1
        self.plain["bytes_read"] += size

    def stats(self, holdings: Holdings) -> DiskStats:
        count = self.plain
        return DiskStats(
            capacity=holdings.index.capacity,
            bytes=holdings.index.used,
            objects=len(holdings.index),
            writes=count["writes"],
            bytes_written=count["bytes_written"],
            write_failures=self.failures.total(),
            failures=dict(self.failures),
            reads=count["reads"],
            bytes_read=count["bytes_read"],
            misses=count["misses"],
            read_failures=count["read_failures"],
            evicted=holdings.evicted,
            removed=count["removed"],
            remove_failures=holdings.failures + count["sync_failures"],
            damaged=self.dropped.total() - sum(self.dropped[reason] for reason in _USELESS),
            dropped={reason: n for reason, n in self.dropped.items() if n},
            left_behind=len(holdings.left),
        )
