"""What a cache of chained blocks evicts. `named` makes each by name; `Belady` needs the future and is made by hand."""

from __future__ import annotations

from moonpool.conductor.caches.base import Access, BlockCache, Factory
from moonpool.conductor.caches.queues import FIFO, LRU, S3FIFO
from moonpool.conductor.caches.ranked import LFU, Belady, LengthAware
from moonpool.conductor.caches.survival import Survival

__all__ = [
    "FIFO",
    "LFU",
    "LRU",
    "NAMES",
    "S3FIFO",
    "Access",
    "Belady",
    "BlockCache",
    "Factory",
    "LengthAware",
    "Survival",
    "named",
]

_MAKERS: dict[str, Factory] = {
    "lru": LRU,
    "lfu": LFU,
    "length_aware": LengthAware,
    "fifo": FIFO,
    "s3fifo": S3FIFO,
    "survival": Survival,
}
NAMES = tuple(_MAKERS)


def named(name: str) -> Factory:
    """KeyError where there is none of this name; `NAMES` has them all."""
    return _MAKERS[name]
