"""A decode instance with a token clock: between two joins or leaves all requests of the batch get tokens at one pace, so that only
joins and leaves are events, however long the answers are."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from moonpool.conductor.simulate.machine import Machine

SLOWEST_SHARE = 0.1
"""A request's time between tokens is the mean of this share of its gaps, the slowest (the paper's measure)."""


class Member:
    """A request in the batch, or waiting for room."""

    __slots__ = ("joined", "number", "output", "tokens")

    def __init__(self, number: int, tokens: int, output: int) -> None:
        self.number, self.tokens, self.output = number, tokens, max(1, output)
        self.joined = 0.0


class DecodeInstance:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._now = 0.0
        self._clock = 0.0
        """Tokens that a request would have got that was there from the start."""
        self._ends: list[tuple[float, int, Member]] = []
        self._waiting: deque[Member] = deque()
        self._reserved = 0
        self._context = 0.0
        self._segments: deque[tuple[float, float]] = deque()
        """Clock at which a pace began, and the pace in seconds for each token."""

    @property
    def batch(self) -> int:
        return len(self._ends)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def step_s(self) -> float:
        return self._machine.perf.step_s(len(self._ends), int(self._context)) if self._ends else 0.0

    def join(self, member: Member, now: float) -> None:
        """Joins at once where there is room for its prompt and answer, else when others have left. A member that is larger than the
        whole memory joins an empty batch."""
        self._run_to(now)
        self._waiting.append(member)
        self._let_in()

    def next_end(self) -> float | None:
        """When the next request has its last token, if nobody joins before."""
        if not self._ends:
            return None
        return self._now + max(0.0, self._ends[0][0] - self._clock) * self.step_s

    def leave(self, now: float) -> tuple[Member, float]:
        """The request whose time `next_end` told, and its time between tokens."""
        self._run_to(now)
        end, _, member = heappop(self._ends)
        self._clock = max(self._clock, end)
        tbt = self._slowest(member.joined, end)
        self._reserved -= member.tokens + member.output
        self._context -= member.tokens + member.output
        oldest = min((m.joined for _, _, m in self._ends), default=self._clock)
        while len(self._segments) > 1 and self._segments[1][0] <= oldest:
            self._segments.popleft()
        self._let_in()
        return member, tbt

    def stop(self) -> list[int]:
        """The instance died: numbers of those that were here."""
        lost = [m.number for _, _, m in self._ends] + [m.number for m in self._waiting]
        self._ends.clear()
        self._waiting.clear()
        self._reserved, self._context = 0, 0.0
        return lost

    def _run_to(self, now: float) -> None:
        if self._ends:
            passed = (now - self._now) / self.step_s
            self._clock += passed
            self._context += passed * len(self._ends)
        self._now = now

    def _let_in(self) -> None:
        while self._waiting:
            member = self._waiting[0]
            need = member.tokens + member.output
            if self._ends and self._reserved + need > self._machine.decode_tokens:
                break
            self._waiting.popleft()
            member.joined = self._clock
            self._reserved += need
            self._context += member.tokens
            heappush(self._ends, (self._clock + member.output, member.number, member))
        if not self._ends:
            self._context = 0.0
        self._segments.append((self._clock, self.step_s))

    def _slowest(self, start: float, end: float) -> float:
        """Mean pace of the slowest tenth of the tokens between two clocks."""
        gaps: list[tuple[float, float]] = []
        until = end
        for begin, pace in reversed(self._segments):
            if begin < until:
                gaps.append((pace, until - max(begin, start)))
                until = begin
            if begin <= start:
                break
        gaps.sort(reverse=True)
        left = wanted = max(1.0, SLOWEST_SHARE * (end - start))
        total = 0.0
        for pace, tokens in gaps:
            part = min(left, tokens)
            total += pace * part
            left -= part
            if left <= 0:
                break
        return total / max(wanted - max(left, 0.0), 1e-12)
