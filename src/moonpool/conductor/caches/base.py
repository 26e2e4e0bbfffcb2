"""One interface for a cache of chained blocks. Pure: time is an argument, nothing is read or written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple, TypeAlias


class Access(NamedTuple):
    """What one prompt did to a cache."""

    hits: int
    """Blocks from the start that were there: what need not be computed."""
    added: list[int]
    evicted: list[int]
    """In the order in which they went. A block may be in both lists: it came, and did not fit."""


class BlockCache(ABC):
    """At most `capacity` blocks. A block is named by its chained key, so it is of use only while all before it are there."""

    name: str

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a cache holds at least one block, not {capacity}")
        self.capacity = capacity

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def held(self) -> Container[int]:
        """The keys that are there."""

    @abstractmethod
    def access(self, keys: Sequence[int], now: float) -> Access:
        """A prompt with these blocks is served at `now` seconds (never earlier than before): touch, add, evict."""

    def clear(self) -> None:
        """Everything is lost (the instance died)."""
        raise NotImplementedError

    def depth(self, keys: Sequence[int]) -> int:
        """Blocks from the start that are there."""
        held = self.held
        for i, key in enumerate(keys):
            if key not in held:
                return i
        return len(keys)


Factory: TypeAlias = Callable[[int], BlockCache]
"""Makes an empty cache of a capacity in blocks."""
