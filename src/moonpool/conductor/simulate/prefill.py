"""A prefill instance: requests in order of arrival, one at a time; a cache behind them; a NIC that sends one thing after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from moonpool.conductor.caches import Access, BlockCache
from moonpool.conductor.simulate.brain import Booking
from moonpool.conductor.simulate.machine import Machine
from moonpool.conductor.simulate.trace import Arrival
from moonpool.conductor.types import Request


class Job:
    """A request on its way."""

    __slots__ = (
        "arrival",
        "booking",
        "cached",
        "change",
        "ended",
        "first_token",
        "moved",
        "number",
        "ready",
        "request",
        "started",
    )

    def __init__(self, number: int, arrival: Arrival, request: Request, booking: Booking) -> None:
        self.number, self.arrival, self.request, self.booking = number, arrival, request, booking
        self.ready = arrival.at
        """When the last block that is moved for it has come."""
        self.moved = (0, 0)
        """The blocks that are moved."""
        self.started = self.first_token = 0.0
        self.cached = 0
        """Tokens that need not be computed."""
        self.change = Access(0, [], [])
        self.ended = False


class Nic(msgspec.Struct):
    """Of a sender."""

    free_at: float = 0.0

    def send(self, now: float, seconds: float) -> float:
        """When it has arrived."""
        self.free_at = max(self.free_at, now) + seconds
        return self.free_at


class PrefillInstance:
    def __init__(self, machine: Machine, cache: BlockCache) -> None:
        self._machine = machine
        self.cache = cache
        self.nic = Nic()
        self.queue: deque[Job] = deque()
        self.running: Job | None = None
        self.up = True
        self.busy_s = 0.0

    @property
    def work_s(self) -> float:
        """Of what waits, as if nothing were cached: for plots."""
        return sum(self._machine.perf.prefill_s(j.arrival.tokens, 0) for j in self.queue)

    def start(self, now: float) -> float | None:
        """Begin with the first of the queue whose blocks have come; its end, or None where there is nothing to begin.

        What the plan hoped for may have been evicted meanwhile: what is there now counts. Room for the prompt's blocks is made now,
        and nobody else can read them before the prefill ends.
        """
        if self.running is not None or not self.queue or self.queue[0].ready > now:
            return None
        job = self.running = self.queue.popleft()
        block = job.request.block_size
        job.change = self.cache.access(job.arrival.keys, now)
        depth = job.change.hits
        if job.moved[0] <= depth:
            depth = max(depth, job.moved[1])
        job.cached = min(depth * block, job.arrival.tokens - 1)
        job.started = now
        seconds = self._machine.perf.prefill_s(job.arrival.tokens, job.cached)
        self.busy_s += seconds
        job.booking.started(now)
        return now + seconds

    def ready_depth(self, keys: Sequence[int]) -> int:
        """Blocks from the start that are there and computed."""
        depth = self.cache.depth(keys)
        if self.running is None:
            return depth
        coming = set(self.running.change.added)
        return next((i for i in range(depth) if keys[i] in coming), depth)

    def stop(self) -> list[Job]:
        """The instance died: the jobs that were here."""
        lost = ([self.running] if self.running else []) + list(self.queue)
        self.running = None
        self.queue.clear()
        self.cache.clear()
        self.up = False
        return lost
