"""What the existing engine cannot do, in one place: errors, skipped tests and `docs/existing-engine.md` speak from this list."""

from __future__ import annotations

from enum import Enum

from moonpool.errors import Unsupported


class Cannot(Enum):
    """Name = what some other pool can do; value = why this one cannot."""

    EMPTY_OBJECTS = "the peer refuses objects of zero bytes (-600)"
    EVICT_ON_DEMAND = "the peer refuses a put that finds no room (-200) and evicts later, in the background"
    EXACT_LRU = "the peer evicts by the end of its read leases over 1024 shards, not by use and depth in the prefix"
    PROBE_WITHOUT_TOUCH = "the peer's probe is a read lease of 10 s"
    REMOVE_WHAT_WAS_READ = "the peer refuses to remove what was read or probed in the last 10 s (-706)"
    RESERVE_POOL_SPACE = "a reservation takes space in this process only; the cluster's is taken at commit"
    NATIVE_REPLACES_CONVERTED = (
        "the peer cannot remove with a put; a converted page stays until evicted, but no lookup gives it"
    )
    EVENTS_OF_OTHERS = "the peer announces nothing: of other processes only puts are heard, late, and only with watch_s"

    REPLACE = "the peer overwrites an object in place, under its readers (torn reads), so it is not asked to"
    STRICT_REPLICAS = (
        "the peer stores as many replicas as it finds room for and does not say how many: strict_replicas=False"
    )
    KEEP_HARD_PINNED = "the peer removes hard-pinned objects without force"
    CHOOSE_COPY_SOURCE = "the peer chooses the replica to copy from"
    FORCE_ONE_REPLICA = "the peer removes one replica only when no lease is on the object"

    def error(self, key: str = "") -> Unsupported:
        return Unsupported(self.value, key=key, fix="See docs/existing-engine.md.")
