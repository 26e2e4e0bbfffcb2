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
    PUT_OPTIONS = "pins, copies, groups and replacing are not passed on to the peer"
    NAME_MESSENGERS = "the peer's segments are not Moonpool's messengers; use its own tools for copies and moves"
    LIST_KEYS = "the peer's client cannot list keys"

    def error(self, key: str = "") -> Unsupported:
        return Unsupported(self.value, key=key, fix="See docs/existing-engine.md.")
