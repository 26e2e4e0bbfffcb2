"""Independent runs in several processes. Cases go there and summaries come back as JSON."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path

import msgspec

from moonpool.conductor.simulate.case import Case, Summary, summarise
from moonpool.conductor.simulate.hit_tables import HitCase
from moonpool.conductor.simulate.hits import HitRate, hit_rate
from moonpool.conductor.simulate.trace import Arrival, Trace, load


def play(case: Case, progress: Callable[[int], None] = lambda done: None) -> Summary:
    """One run, here."""
    from moonpool.conductor.simulate.wiring import run

    return summarise(run(case, trace_of(case), progress), case)


def trace_of(case: Case) -> Trace:
    """The case's trace at its speed and length."""
    trace = _trace(case.trace, case.limit)
    if case.one_token:
        trace = Trace(trace.name, tuple(Arrival(a.at, a.tokens, 1, a.keys) for a in trace.arrivals))
    return trace if case.speed == 1.0 else trace.faster(case.speed)


@lru_cache(maxsize=4)
def _trace(path: str, limit: int | None) -> Trace:
    return load(Path(path), limit=limit)


def _play_json(case: bytes) -> bytes:
    return msgspec.json.encode(play(msgspec.json.decode(case, type=Case)))


def _hit_json(case: bytes) -> bytes:
    wanted = msgspec.json.decode(case, type=HitCase)
    return msgspec.json.encode(hit_rate(_trace(wanted.trace, None), wanted.policy, wanted.capacity))


def run_all(
    hits: Sequence[HitCase], cases: Sequence[Case], processes: int, progress: Callable[[], None] = lambda: None
) -> tuple[dict[HitCase, HitRate], dict[Case, Summary]]:
    """All of them; `progress` is called for each that is done."""
    rates: dict[HitCase, HitRate] = {}
    summaries: dict[Case, Summary] = {}
    # A forked child would inherit this process's threads in the middle of what they do.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=processes, mp_context=context) as pool:
        # Long ones first, so that the last ones do not run alone.
        played = {pool.submit(_play_json, msgspec.json.encode(c)): c for c in sorted(cases, key=_weight, reverse=True)}
        looked = {pool.submit(_hit_json, msgspec.json.encode(h)): h for h in hits}
        for future in as_completed([*played, *looked]):
            if future in played:
                summaries[played[future]] = msgspec.json.decode(future.result(), type=Summary)
            else:
                rates[looked[future]] = msgspec.json.decode(future.result(), type=HitRate)
            progress()
    return rates, summaries


def _weight(case: Case) -> float:
    return Path(case.trace).stat().st_size * case.prefill
