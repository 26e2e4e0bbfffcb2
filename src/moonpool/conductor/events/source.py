"""One publisher's events in order: a pure state machine for each (instance, rank).

    COLD ──first event──► REPLAYING ──its end──► EXACT ──gap──► REPLAYING …
                              └──nothing, too late, or lost for good──► DEGRADED ──all cleared, or it restarts──► EXACT

Sequence numbers begin at 0 with the engine. What was missed is asked for again from the last number on; live events wait meanwhile
and are then applied in order. EXACT is never claimed from a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from moonpool.conductor.events.codec import Batch, Cleared

State = Literal["cold", "replaying", "exact", "degraded"]


@dataclass(frozen=True, slots=True)
class Apply:
    batch: Batch


@dataclass(frozen=True, slots=True)
class Forget:
    """All that this source has told: it began anew."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Ask for all from this number on."""

    start: int


Action: TypeAlias = Apply | Forget | Replay


class Source:
    def __init__(
        self, *, replays: bool, cool_down_s: float = 30.0, answer_s: float = 10.0, waiting: int = 100_000
    ) -> None:
        """`replays`: whether it can be asked. `cool_down_s`: after a replay that failed, until the next. `answer_s`: a replay may
        be silent for so long. `waiting`: live batches held meanwhile, at most."""
        self._replays, self._cool_down, self._answer, self._most = replays, cool_down_s, answer_s, waiting
        self.state: State = "cold"
        self.last = -1
        """Sequence number that all before it, and itself, are applied up to."""
        self._waiting: dict[int, Batch] = {}
        self._asked = self._failed = float("-inf")
        self.gaps = self.dropped = 0

    def live(self, number: int, batch: Batch, now: float) -> list[Action]:
        """A published batch."""
        if self.state == "replaying":
            if len(self._waiting) < self._most:
                self._waiting[number] = batch
            else:
                self.dropped += 1
            return self.tick(now)
        actions: list[Action] = []
        if number <= self.last:
            if number == self.last:
                return []
            actions, self.last, self.state = [Forget()], -1, "cold"  # it restarted
        if number == self.last + 1:
            return [*actions, self._applied(number, batch)]
        self.gaps += 1
        return [*actions, *self._miss(number, batch, now)]

    def _applied(self, number: int, batch: Batch) -> Apply:
        self.last = number
        cleared = any(isinstance(e, Cleared) for e in batch.events)
        if self.state == "cold" or (self.state == "degraded" and cleared):
            self.state = "exact"
        return Apply(batch)

    def _miss(self, number: int, batch: Batch, now: float) -> list[Action]:
        if not self._replays or now < self._failed + self._cool_down:
            self.state = "degraded"
            return [self._applied(number, batch)]
        self.state, self._asked = "replaying", now
        self._waiting = {number: batch}
        return [Replay(self.last + 1)]

    def replayed(self, number: int, batch: Batch, now: float) -> list[Action]:
        """One batch of a replay. One that begins behind what was asked for has lost the rest for good."""
        if self.state != "replaying" or number <= self.last:
            return []
        self._asked = now
        if number > self.last + 1 and number not in self._waiting:
            return [*self._give_up(now), *self.live(number, batch, now)]
        return [self._applied(number, batch), *self._catch_up()]

    def replay_ended(self, now: float) -> list[Action]:
        if self.state != "replaying":
            return []
        actions = self._catch_up()
        if self._waiting:
            return [*actions, *self._give_up(now)]
        self.state = "exact"
        return actions

    def tick(self, now: float) -> list[Action]:
        """Time passes: a replay that nobody answers is given up."""
        return self._give_up(now) if self.state == "replaying" and now >= self._asked + self._answer else []

    def _catch_up(self) -> list[Action]:
        actions: list[Action] = []
        while (batch := self._waiting.pop(self.last + 1, None)) is not None:
            actions.append(self._applied(self.last + 1, batch))
        for old in [n for n in self._waiting if n <= self.last]:
            del self._waiting[old]
        return actions

    def _give_up(self, now: float) -> list[Action]:
        """What waits is applied as it is; the source is no longer exact."""
        self._failed, self.state = now, "degraded"
        held, self._waiting = self._waiting, {}
        return [self._applied(n, held[n]) for n in sorted(held) if n > self.last]


def batches(actions: Sequence[Action]) -> list[Batch]:
    """What is to be applied, in order."""
    return [a.batch for a in actions if isinstance(a, Apply)]
