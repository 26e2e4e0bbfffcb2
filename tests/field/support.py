"""Shared by the files of this folder."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.store.messenger.records import Limits, Reserved
from moonpool.store.messenger.state import MessengerState
from moonpool.testing.fake_clock import FakeClock
from moonpool.types import Put, PutOptions

KIB, MIB = 1 << 10, 1 << 20
SESSION = 1


def state_of(capacity: int, limits: Limits = Limits(high_watermark=1.0, eviction_ratio=0.0)) -> MessengerState:
    return MessengerState(capacity, FakeClock(), limits)


def put(state: MessengerState, key: str, size: int = 64, options: PutOptions = PutOptions()) -> bool:
    """Whether it was stored."""
    got = state.reserve(SESSION, key, size, options)
    return isinstance(got, Reserved) and state.commit(SESSION, [got.id]) == [Put.STORED]


def there(state: MessengerState, keys: Sequence[str]) -> int:
    return sum(state.exist(keys))
