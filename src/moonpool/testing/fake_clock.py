"""A clock that moves only when told."""

from __future__ import annotations


class FakeClock:
    """A `Clock` for tests. `advance` is the only way its time goes on."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "a monotonic clock does not go back"
        self._now += seconds
