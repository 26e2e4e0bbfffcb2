"""One interface for a cache of chained blocks. Pure: time is an argument, nothing is read or written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple, TypeAlias


class Access(NamedTuple):
    """What one prompt did to a cache."""

    hits: int
    """Blocks from the start that were there: what need not be computed."""
    added: list[int]
    """Were not there before, and are."""
    evicted: list[int]
    """Were there before, and are not."""


def access_of(hits: int, added: list[int], evicted: list[int]) -> Access:
    """From all comings and goings: a block that came and did not fit, or went and came back, is as it was."""
    if not evicted or set(added).isdisjoint(evicted):
        return Access(hits, added, evicted)
    net = Counter(added)
    net.subtract(evicted)
    return Access(hits, [k for k, n in net.items() if n > 0], [k for k, n in net.items() if n < 0])


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
