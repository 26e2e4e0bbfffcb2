"""The simulator: by hand where a trace is small, and what must hold on the sample."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from moonpool.conductor.caches import LRU
from moonpool.conductor.perf import PerfModel
from moonpool.conductor.simulate import brain, hits, trace
from moonpool.conductor.simulate.case import Case, summarise
from moonpool.conductor.simulate.decode import DecodeInstance, Member
from moonpool.conductor.simulate.engine import Engine, Failure, Run, Setup
from moonpool.conductor.simulate.machine import Machine
from moonpool.conductor.simulate.parallel import play, trace_of
from moonpool.conductor.simulate.trace import Arrival, Trace
from moonpool.conductor.simulate.wiring import run
from moonpool.conductor.types import InstanceId, Plan, Refusal, Request, Transfer
from moonpool.errors import TraceError
from tests.conductor.data.make_sample import sample

SAMPLE = Path(__file__).parent / "data" / "sample_trace.jsonl"
PLAIN = Machine(
    perf=PerfModel(
        prefill=(0.0, 0.001, 0.0), decode=(0.01, 0.0, 0.0), latency_s=0.0, bandwidth=1e6, kv_bytes_per_token=100.0
    )
)
"""A token takes 1 ms of prefill, 10 ms of decode and 0.1 ms of NIC."""


class Told:
    """A brain that does as it was told, and remembers what was said to it."""

    def __init__(self, plans: list[Plan | Refusal]) -> None:
        self.plans = plans
        self.said: list[tuple[str, float]] = []
        self.changes: list[tuple[InstanceId, list[int], list[int], float]] = []

    def decide(self, request: Request, now: float) -> brain.Booking | Refusal:
        plan = self.plans[int(request.id)]
        return plan if isinstance(plan, Refusal) else _Booking(self, plan, request.id)

    def cached(self, instance: InstanceId, added: object, evicted: object, now: float) -> None:
        assert isinstance(added, list)
        assert isinstance(evicted, list)
        if added or evicted:
            self.changes.append((instance, added, evicted, now))

    def died(self, instance: InstanceId, now: float) -> None:
        self.said.append((f"{instance} died", now))

    def joined(self, instance: InstanceId, now: float) -> None:
        self.said.append((f"{instance} joined", now))

    def copies(self, now: float) -> list[brain.Copy]:
        return []


class _Booking:
    def __init__(self, told: Told, plan: Plan, name: str) -> None:
        self._told, self._plan, self._name = told, plan, name

    @property
    def plan(self) -> Plan:
        return self._plan

    def _say(self, what: str, now: float) -> None:
        self._told.said.append((f"{self._name} {what}", now))

    def started(self, now: float) -> None:
        self._say("started", now)

    def first_token(self, now: float) -> None:
        self._say("first token", now)

    def decode(self, now: float) -> Refusal | None:
        return None

    def finished(self, now: float) -> None:
        self._say("finished", now)

    def failed(self, now: float) -> None:
        self._say("failed", now)


def simulate(arrivals: list[Arrival], plans: list[Plan | Refusal], **setup: object) -> tuple[Run, Told]:
    told = Told(plans)
    made = Setup(prefill=2, decode=1, machine=PLAIN, sample_s=0.0, **setup)  # type: ignore[arg-type]
    return Engine(made, told, LRU).run(Trace("by hand", tuple(arrivals))), told


def test_one_at_a_time_and_hits_shorten_the_second() -> None:
    arrivals = [Arrival(0.0, 1024, 10, (1, 2)), Arrival(0.1, 1536, 10, (1, 2, 3))]
    here = Plan(prefill="p0", decode="d0")
    done, told = simulate(arrivals, [here, here])
    first, second = done.results
    assert first.ttft == pytest.approx(1.024)
    assert second.ttft == pytest.approx(1.024 - 0.1 + 0.512)
    assert (second.cached, second.outcome) == (1024, "done")
    assert told.changes[0][:3] == ("p0", [2, 1], [])
    assert told.changes[0][3] == pytest.approx(1.024)
    # Its KV leaves while prefill goes on; then 10 tokens at 10 ms.
    assert first.ended == pytest.approx(1.024 + 0.1)
    assert first.tbt == pytest.approx(0.01)


def test_blocks_that_are_moved_count_and_wait_for_the_link() -> None:
    arrivals = [Arrival(0.0, 1024, 1, (1, 2)), Arrival(2.0, 1536, 1, (1, 2, 3))]
    plans: list[Plan | Refusal] = [
        Plan(prefill="p0", decode="d0"),
        Plan(prefill="p1", decode="d0", transfers=(Transfer("p0", "p1", 0, 2),)),
    ]
    done, told = simulate(arrivals, plans)
    assert done.results[1].ttft == pytest.approx(0.1024 + 0.512)
    assert told.changes[1][:2] == ("p1", [3, 2, 1])


def test_blocks_that_are_not_there_yet_are_not_moved() -> None:
    arrivals = [Arrival(0.0, 1024, 1, (1, 2)), Arrival(0.5, 1536, 1, (1, 2, 3))]
    plans: list[Plan | Refusal] = [
        Plan(prefill="p0", decode="d0"),
        Plan(prefill="p1", decode="d0", transfers=(Transfer("p0", "p1", 0, 2),)),
    ]
    done, _ = simulate(arrivals, plans)
    assert done.results[1].ttft == pytest.approx(1.536)
    assert done.results[1].cached == 0


def test_a_dead_instance_loses_requests_and_cache_and_comes_back_empty() -> None:
    arrivals = [Arrival(at, 1024, 1, (1, 2)) for at in (0.0, 2.0, 2.1, 5.0)]
    here = Plan(prefill="p0", decode="d0")
    done, told = simulate(arrivals, [here] * 4, failures=(Failure("p0", 2.0005, 4.0),))
    assert [r.outcome for r in done.results] == ["done", "failed", "done", "done"]
    assert done.results[3].cached == 1023
    assert ("p0 died", 2.0005) in told.said
    assert told.said.count(("p0 joined", 4.0)) == 1


def test_a_refused_request_ends_at_once() -> None:
    done, told = simulate([Arrival(0.0, 512, 1, (1,))], [Refusal(stage="prefill", why="full")])
    assert done.results[0].outcome == "refused"
    assert told.said == []


def test_decode_slows_down_when_another_joins() -> None:
    perf = PerfModel(decode=(0.0, 0.01, 0.0))
    instance = DecodeInstance(Machine(perf=perf))
    instance.join(Member(0, 10, 10), 0.0)
    assert instance.next_end() == pytest.approx(0.1)
    instance.join(Member(1, 10, 20), 0.05)
    assert instance.next_end() == pytest.approx(0.05 + 5 * 0.02)
    member, tbt = instance.leave(0.15)
    assert member.number == 0
    assert tbt == pytest.approx(0.02)
    assert instance.next_end() == pytest.approx(0.15 + 15 * 0.01)


def test_decode_waits_for_room() -> None:
    instance = DecodeInstance(Machine(perf=PerfModel(decode=(0.01, 0.0, 0.0)), decode_tokens=100))
    instance.join(Member(0, 50, 10), 0.0)
    instance.join(Member(1, 50, 10), 0.0)
    assert (instance.batch, instance.waiting) == (1, 1)
    instance.leave(0.1)
    assert (instance.batch, instance.waiting) == (1, 0)
    assert instance.next_end() == pytest.approx(0.2)


def test_the_sample_is_what_the_script_makes() -> None:
    loaded = trace.load(SAMPLE, spread=False)
    ids = [r["hash_ids"] for r in sample()]
    assert [a.keys for a in loaded.arrivals] == [tuple(trace.block_key(i) for i in one) for one in ids]  # type: ignore[attr-defined]
    assert trace.prefix_breaks(loaded.keys) == 0


def test_spreading_keeps_order_and_span() -> None:
    assert trace.spread_buckets([0, 0, 0, 3000, 3000, 60000]) == [0, 1000, 2000, 3000, 4500, 60000]
    assert trace.spread_buckets([5.0]) == [5.0]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "line 2: not a request"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1}', "hash_ids"),
        ('{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "needed 2 ids"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}', "lengths make no request"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1, 1]}', "two places"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [-1]}', "not a request"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "backwards"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(TraceError, match=what):
        trace.load(path)


def test_faster_keeps_the_requests() -> None:
    loaded = trace.load(SAMPLE)
    assert loaded.faster(2.0).seconds == pytest.approx(loaded.seconds / 2)
    with pytest.raises(TraceError):
        loaded.faster(0.0)


def test_hit_rate_by_hand() -> None:
    arrivals = (Arrival(0.0, 1000, 1, (1, 2)), Arrival(1.0, 1500, 1, (1, 2, 3)))
    rate = hits.hit_rate(Trace("two", arrivals), "lru", None)
    assert (rate.block, rate.token, rate.request) == pytest.approx((2 / 5, 1024 / 2500, (2 / 3) / 2))


@pytest.mark.parametrize("policy", ["random", "local", "kvcache"])
@pytest.mark.parametrize("admission", ["off", "predict"])
def test_every_request_ends_once_and_nothing_is_left_in_the_ledger(policy: str, admission: str) -> None:
    """`run` itself raises where a lease is left."""
    failures = (Failure("p0", 100.0, 200.0), Failure("d1", 150.0, 250.0))
    case = Case(
        trace=str(SAMPLE), policy=policy, prefill=3, decode=2, speed=8.0, admission=admission, failures=failures
    )
    loaded = trace_of(case)
    results = run(case, loaded).results
    assert [r.number for r in results] == list(range(len(loaded.arrivals)))
    assert all(r.ended >= r.arrived for r in results)
    summary = summarise(run(case, loaded), case)
    assert summary.done + summary.refused + summary.refused_after + summary.failed == summary.requests


def test_same_seed_same_numbers() -> None:
    case = Case(trace=str(SAMPLE), prefill=3, decode=2, speed=8.0)
    assert play(case) == play(case)
    other = play(Case(trace=str(SAMPLE), policy="random", prefill=3, decode=2, seed=1))
    assert other != play(Case(trace=str(SAMPLE), policy="random", prefill=3, decode=2, seed=2))


def test_knowing_the_cache_beats_chance_on_the_sample() -> None:
    runs = {p: play(Case(trace=str(SAMPLE), policy=p, prefill=3, decode=2, speed=8.0)) for p in ("random", "kvcache")}
    assert runs["kvcache"].hit > runs["random"].hit
    assert runs["kvcache"].ttft.mean < runs["random"].ttft.mean


def test_random_is_not_global() -> None:
    """A run uses its own random numbers: others' draws do not change it."""
    case = Case(trace=str(SAMPLE), policy="random", prefill=3, decode=2)
    first = play(case)
    random.seed(1)
    assert play(case) == first
