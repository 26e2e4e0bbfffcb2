"""What the metadata server knows: opaque values by key, within bounds. Pure; the caller serialises access."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

MAX_KEY = 1024
MAX_VALUE = 4 << 20
"""Bytes: a descriptor of about 40 000 buffers."""
MAX_KEYS = 65536
MAX_TOTAL = 256 << 20
_UNIQUE = "rpc_meta"
"""Keys with this in their name say where a process listens. Another process must not take the place of a living one."""


class Outcome(Enum):
    DONE = "done"
    TAKEN = "taken"
    TOO_LARGE = "too large"
    FULL = "full"


class Table:
    def __init__(self, *, max_keys: int = MAX_KEYS, max_value: int = MAX_VALUE, max_total: int = MAX_TOTAL) -> None:
        self.values: dict[str, bytes] = {}
        self.max_value = max_value
        self._max_keys, self._max_total = max_keys, max_total
        self._total = 0

    @property
    def total(self) -> int:
        """Bytes of all values."""
        return self._total

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def put(self, key: str, value: bytes) -> Outcome:
        """Replaces what is there, except another owner's place (TAKEN); the same owner may say the same again."""
        old = self.values.get(key)
        if old is not None and _UNIQUE in key and old != value:
            return Outcome.TAKEN
        if len(value) > self.max_value or len(key.encode("utf-8", "surrogatepass")) > MAX_KEY:
            return Outcome.TOO_LARGE
        total = self._total + len(value) - len(old or b"")
        if total > self._max_total or (old is None and len(self.values) >= self._max_keys):
            return Outcome.FULL
        self.values[key], self._total = value, total
        return Outcome.DONE

    def remove(self, key: str) -> bool:
        """False if there is no such key."""
        old = self.values.pop(key, None)
        self._total -= len(old or b"")
        return old is not None

    def remove_owner(self, name: str) -> int:
        """Forget a process that died: all keys that end in `/name` (its `host:port`). Returns how many."""
        return self._remove(lambda key: key.rpartition("/")[2] == name)

    def _remove(self, dead: Callable[[str], bool]) -> int:
        return sum(self.remove(key) for key in [k for k in self.values if dead(k)])
