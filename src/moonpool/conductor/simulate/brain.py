"""What decides in a simulation. The engine knows no more of the conductor than this; `wiring.py` fits the live classes to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from moonpool.conductor.types import InstanceId, Plan, Refusal, Request


class Copy(NamedTuple):
    """A hot prefix goes to one more cache."""

    source: InstanceId
    target: InstanceId
    keys: tuple[int, ...]


class Booking(Protocol):
    """A plan that was taken, with its lease."""

    @property
    def plan(self) -> Plan: ...

    def started(self, now: float) -> None:
        """Its prefill runs."""
        ...

    def first_token(self, now: float) -> None:
        """Its prefill ended."""
        ...

    def decode(self, now: float) -> Refusal | None:
        """It would join the decode instance now. A refusal ends the booking: its prefill was for nothing."""
        ...

    def finished(self, now: float) -> None: ...

    def failed(self, now: float) -> None: ...


class Brain(Protocol):
    def decide(self, request: Request, now: float) -> Booking | Refusal: ...

    def cached(self, instance: InstanceId, added: Sequence[int], evicted: Sequence[int], now: float) -> None:
        """An instance's cache took blocks in and let others go. `added` come in the order of a prompt, deepest last."""
        ...

    def died(self, instance: InstanceId, now: float) -> None: ...

    def joined(self, instance: InstanceId, now: float) -> None:
        """It is back, empty."""
        ...

    def copies(self, now: float) -> Sequence[Copy]:
        """Prefixes to replicate now."""
        ...
