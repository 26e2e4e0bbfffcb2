"""The discrete-event engine: a heap of events, prefill and decode instances, and a brain that decides. Pure: same input, same output.

A request's way: decided on arrival, blocks moved to its prefill instance while it waits there, prefill, its KV sent to the decode
instance layer by layer while prefill goes on, decode. The blocks of a prompt are in the cache from the end of its prefill on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Literal

import msgspec

from moonpool.conductor.caches import Factory
from moonpool.conductor.chain import KeyChain
from moonpool.conductor.simulate.brain import Brain
from moonpool.conductor.simulate.decode import DecodeInstance, Member
from moonpool.conductor.simulate.machine import Machine
from moonpool.conductor.simulate.prefill import Job, PrefillInstance
from moonpool.conductor.simulate.trace import BLOCK, Arrival, Trace
from moonpool.conductor.types import SLO, InstanceId, Refusal, Request

Outcome = Literal["done", "refused", "refused after prefill", "failed"]


class Result(msgspec.Struct, frozen=True):
    """How a request went. Times in seconds; those that it did not come to are 0."""

    number: int
    outcome: Outcome
    arrived: float
    ttft: float = 0.0
    tbt: float = 0.0
    prefill_s: float = 0.0
    cached: int = 0
    tokens: int = 0
    predicted_ttft: float = 0.0
    prefill: InstanceId = ""
    ended: float = 0.0


class Load(msgspec.Struct, frozen=True):
    """Both pools at one moment: requests on an instance, on average."""

    at: float
    prefill: float
    decode: float
    prefill_s: float
    """Queued work in seconds for an instance, cache hits not counted."""
    step_s: float
    """Time between tokens, on average over instances that decode."""


class Failure(msgspec.Struct, frozen=True):
    """An instance dies, and comes back empty."""

    instance: InstanceId
    at: float
    back_at: float


class Run(msgspec.Struct, frozen=True):
    results: list[Result]
    """In order of arrival."""
    load: list[Load]
    replicas: list[tuple[float, list[int]]]
    """At times, how many caches hold each of the watched blocks."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    prefill: int = 8
    decode: int = 8
    machine: Machine = Machine()
    slo: SLO = SLO()
    model: str = "llama3-70b"
    sample_s: float = 10.0
    """Between two looks at the load; 0 for none."""
    watched: tuple[int, ...] = ()
    """Blocks whose replicas are counted at each look."""
    failures: tuple[Failure, ...] = ()
    replicate_s: float = 0.0
    """Between two looks for hot prefixes; 0 for none."""

    @property
    def prefill_ids(self) -> list[InstanceId]:
        return [f"p{i}" for i in range(self.prefill)]

    @property
    def decode_ids(self) -> list[InstanceId]:
        return [f"d{i}" for i in range(self.decode)]


class Engine:
    def __init__(self, setup: Setup, brain: Brain, caches: Factory) -> None:
        machine = setup.machine
        self._setup, self._brain, self._machine = setup, brain, machine
        blocks = max(1, machine.cache_tokens // BLOCK)
        self._prefill = {i: PrefillInstance(machine, caches(blocks)) for i in setup.prefill_ids}
        self._decode = {i: DecodeInstance(machine) for i in setup.decode_ids}
        self._decode_up = set(self._decode)
        self._epoch = dict.fromkeys(self._decode, 0)
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        self._jobs: dict[int, Job] = {}
        self._results: dict[int, Result] = {}
        self._load: list[Load] = []
        self._replicas: list[tuple[float, list[int]]] = []

    def run(self, trace: Trace, progress: Callable[[int], None] = lambda done: None) -> Run:
        """`progress` is told how many requests have arrived."""
        for failure in self._setup.failures:
            self._at(failure.at, partial(self._die, failure.instance))
            self._at(failure.back_at, partial(self._come_back, failure.instance))
        if self._setup.sample_s:
            self._at(0.0, lambda now: self._look(now, trace.seconds))
        if self._setup.replicate_s:
            self._at(self._setup.replicate_s, partial(self._replicate, trace.seconds))
        for number, arrival in enumerate(trace.arrivals):
            self._run_until(arrival.at)
            self._arrive(number, arrival)
            if number % 256 == 0:
                progress(number)
        self._run_until(float("inf"))
        progress(len(trace.arrivals))
        return Run([self._results[i] for i in range(len(trace.arrivals))], self._load, self._replicas)

    def _at(self, when: float, action: Callable[[float], None]) -> None:
        self._order += 1
        heappush(self._heap, (when, self._order, action))

    def _run_until(self, until: float) -> None:
        """All events before `until`."""
        heap = self._heap
        while heap and heap[0][0] < until:
            now, _, action = heappop(heap)
            action(now)

    def _arrive(self, number: int, arrival: Arrival) -> None:
        now = arrival.at
        request = Request(
            id=str(number),
            model=self._setup.model,
            chain=KeyChain(arrival.keys),
            tokens=arrival.tokens,
            block_size=BLOCK,
            output_tokens=max(1, arrival.output_tokens),
            slo=self._setup.slo,
        )
        answer = self._brain.decide(request, now)
        if isinstance(answer, Refusal):
            self._results[number] = Result(
                number, "refused", now, tokens=arrival.tokens, predicted_ttft=answer.predicted.ttft_s, ended=now
            )
            return
        job = self._jobs[number] = Job(number, arrival, request, answer)
        self._move(job, now)
        target = answer.plan.prefill
        self._prefill[target].queue.append(job)
        if job.ready > now:
            self._at(job.ready, lambda now: self._start(target, now))
        self._start(target, now)

    def _move(self, job: Job, now: float) -> None:
        """Send what the plan wants moved, as far as it is where the plan thinks it is."""
        for transfer in job.booking.plan.transfers:
            source = self._prefill.get(transfer.source)
            if source is None or not source.up:
                continue
            last = min(transfer.last, source.ready_depth(job.arrival.keys))
            if last <= transfer.first:
                continue
            tokens = min(last * BLOCK, job.arrival.tokens) - transfer.first * BLOCK
            job.ready = max(job.ready, source.nic.send(now, self._machine.perf.transfer_s(tokens)))
            job.moved = (transfer.first, last)

    def _replicate(self, last: float, now: float) -> None:
        for copy in self._brain.copies(now):
            source = self._prefill[copy.source]
            keys = copy.keys[: source.ready_depth(copy.keys)]
            if source.up and keys:
                arrives = source.nic.send(now, self._machine.perf.transfer_s(len(keys) * BLOCK))
                self._at(arrives, partial(self._copied, copy.target, keys))
        if now + self._setup.replicate_s <= last:
            self._at(now + self._setup.replicate_s, partial(self._replicate, last))

    def _copied(self, target: InstanceId, keys: Sequence[int], now: float) -> None:
        if self._prefill[target].up:
            change = self._prefill[target].cache.access(keys, now)
            self._tell(target, change.added, change.evicted, now)

    def _start(self, instance: InstanceId, now: float) -> None:
        here = self._prefill[instance]
        end = here.start(now)
        if end is None:
            if here.up and here.running is None and here.queue and here.queue[0].ready > now:
                self._at(here.queue[0].ready, lambda now: self._start(instance, now))
            return
        job = here.running
        assert job is not None
        self._tell(instance, [], job.change.evicted, now)
        sent = here.nic.send(now, self._machine.perf.transfer_s(job.arrival.tokens))
        self._at(end, lambda now: self._prefilled(instance, job, sent, now))

    def _prefilled(self, instance: InstanceId, job: Job, sent: float, now: float) -> None:
        if job.ended:
            return
        here = self._prefill[instance]
        here.running = None
        job.first_token = now
        self._tell(instance, job.change.added, [], now)
        job.booking.first_token(now)
        self._start(instance, now)
        self._at(max(now, sent), lambda now: self._join(job, now))

    def _tell(self, instance: InstanceId, added: Sequence[int], evicted: Sequence[int], now: float) -> None:
        delay = self._machine.event_delay_s
        if delay:
            self._at(now + delay, lambda now: self._brain.cached(instance, added, evicted, now))
        else:
            self._brain.cached(instance, added, evicted, now)

    def _join(self, job: Job, now: float) -> None:
        if job.ended:
            return
        refusal = job.booking.decode(now)
        target = job.booking.plan.decode
        if refusal is not None:
            self._end(job, "refused after prefill", now)
        elif target not in self._decode_up:
            job.booking.failed(now)
            self._end(job, "failed", now)
        else:
            self._decode[target].join(Member(job.number, job.arrival.tokens, job.arrival.output_tokens), now)
            self._plan_leave(target)

    def _plan_leave(self, instance: InstanceId) -> None:
        """The next end of a batch changes with each join and leave: older ones that were planned are void."""
        self._epoch[instance] += 1
        epoch = self._epoch[instance]
        end = self._decode[instance].next_end()
        if end is not None:
            self._at(end, lambda now: self._leave(instance, epoch, now))

    def _leave(self, instance: InstanceId, epoch: int, now: float) -> None:
        if epoch != self._epoch[instance]:
            return
        member, tbt = self._decode[instance].leave(now)
        job = self._jobs[member.number]
        job.booking.finished(now)
        self._end(job, "done", now, tbt)
        self._plan_leave(instance)

    def _end(self, job: Job, outcome: Outcome, now: float, tbt: float = 0.0) -> None:
        job.ended = True
        del self._jobs[job.number]
        done = job.first_token > 0
        self._results[job.number] = Result(
            number=job.number,
            outcome=outcome,
            arrived=job.arrival.at,
            ttft=job.first_token - job.arrival.at if done else 0.0,
            tbt=tbt,
            prefill_s=job.first_token - job.started if done else 0.0,
            cached=job.cached,
            tokens=job.arrival.tokens,
            predicted_ttft=job.booking.plan.predicted.ttft_s,
            prefill=job.booking.plan.prefill,
            ended=now,
        )

    def _die(self, instance: InstanceId, now: float) -> None:
        if instance in self._prefill:
            lost = self._prefill[instance].stop()
        else:
            self._decode_up.discard(instance)
            self._epoch[instance] += 1
            lost = [self._jobs[n] for n in self._decode[instance].stop()]
        self._brain.died(instance, now)
        for job in lost:
            job.booking.failed(now)
            self._end(job, "failed", now)

    def _come_back(self, instance: InstanceId, now: float) -> None:
        if instance in self._prefill:
            self._prefill[instance].up = True
        else:
            self._decode_up.add(instance)
        self._brain.joined(instance, now)

    def _look(self, now: float, last: float) -> None:
        prefill, decode = self._prefill.values(), self._decode.values()
        steps = [d.step_s for d in decode if d.batch]
        self._load.append(
            Load(
                at=now,
                prefill=sum(len(p.queue) + (p.running is not None) for p in prefill) / len(prefill),
                decode=sum(d.batch + d.waiting for d in decode) / len(decode),
                prefill_s=sum(p.work_s for p in prefill) / len(prefill),
                step_s=sum(steps) / len(steps) if steps else 0.0,
            )
        )
        if self._setup.watched:
            counts = [sum(key in p.cache.held for p in prefill) for key in self._setup.watched]
            self._replicas.append((now, counts))
        if now + self._setup.sample_s <= last:
            self._at(now + self._setup.sample_s, lambda now: self._look(now, last))
