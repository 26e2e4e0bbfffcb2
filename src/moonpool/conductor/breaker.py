"""A circuit breaker of one instance: a pure state machine.

    closed ── `failures` in a row ──► open ── `open_s` later ──► half open ── one probe: good ──► closed
                                        ▲                            └───────── bad ──┘

Only what says that the instance is broken counts: a refused connection, a 5xx, a time-out. A 4xx is the client's own mistake. Bytes
that arrive count as life: an engine that is busy for minutes is not dead.
"""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["closed", "open", "half_open"]


class BreakerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    failures: int = 3
    """In a row, without any success between them."""
    open_s: float = 5.0
    """Until one request is let through again; doubles with each failed probe, up to `longest_s`."""
    longest_s: float = 60.0
    penalty_s: float = 2.0
    """Added to the instance's score after a failure, halved each `open_s`: the next best one gets the next request."""


class Breaker:
    def __init__(self, options: BreakerOptions = BreakerOptions()) -> None:
        self._o = options
        self._failures = 0
        self._opened: float | None = None
        self._wait = options.open_s
        self._probing = False
        self._last_failure: float | None = None

    def state(self, now: float) -> State:
        if self._opened is None:
            return "closed"
        return "half_open" if now >= self._opened + self._wait else "open"

    def admits(self, now: float) -> bool:
        """Whether a request may go there now."""
        state = self.state(now)
        return state == "closed" or (state == "half_open" and not self._probing)

    def started(self, now: float) -> None:
        """A request goes there; in the half-open state it is the probe."""
        self._probing = self._probing or self.state(now) == "half_open"

    def succeeded(self, now: float) -> None:
        self._failures, self._opened, self._probing, self._wait = 0, None, False, self._o.open_s

    def failed(self, now: float) -> None:
        """A connection was refused or lost, or a 5xx or a time-out came."""
        probe = self.state(now) == "half_open"
        self._failures += 1
        self._last_failure, self._probing = now, False
        if probe:
            self._wait = min(self._o.longest_s, 2 * self._wait)
        if probe or self._failures >= self._o.failures:
            self._opened = now

    def abandoned(self) -> None:
        """The request ended and says nothing about the instance: a 4xx, the client went away."""
        self._probing = False

    def penalty_s(self, now: float) -> float:
        """What a recent failure adds to the instance's score."""
        if self._last_failure is None:
            return 0.0
        return float(self._o.penalty_s * 0.5 ** ((now - self._last_failure) / self._o.open_s))
