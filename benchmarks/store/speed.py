"""Batches and single calls between two processes and inside one, existence, read views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks import figures
from benchmarks.store.plan import Plan
from benchmarks.store.rounds import Measure, Samples, alternate, faster, sooner
from benchmarks.store.sides import Sides, Worker

Figures = dict[str, object]
_KEYS = 2048
_SINGLE = 4 << 10


def two_processes(plan: Plan) -> Figures:
    """Client and holder are two processes of one host: ours, the peer by default, the peer through shared memory, a plain copy."""
    found: Figures = {}
    with Sides(plan.peer) as sides:
        workers = {"ours": sides.ours(plan.segment, plan.buffer)}
        if sides.has_peer:
            workers["peer"] = sides.peer(plan.segment, plan.buffer)
            workers["peer_shm"] = sides.peer_shm(plan.segment, plan.buffer)
        for label, size in plan.sizes().items():
            measures = {name: batches(w, size, plan) for name, w in workers.items()}
            measures |= {f"copy_{threads}": _copies(workers["ours"], size, threads) for threads in (1, 2)}
            samples = alternate(measures, plan.rounds)
            _show(f"two processes, batches of 128 × {label}, GiB/s", samples, ("put", "get"))
            found |= _rates("two_process", label, samples)
        singles = alternate({name: _singles(w, plan) for name, w in workers.items()}, plan.rounds)
    _show("two processes, single calls of 4 KiB, µs", singles, _TIMES, lower=True)
    return found | _raw("two_process_single_4k", singles, _TIMES)


def one_process(plan: Plan) -> Figures:
    """Client and holder are one process."""
    found: Figures = {}
    with Sides(plan.peer) as sides:
        workers = {"ours": sides.ours_embedded(plan.segment, plan.buffer)}
        if sides.has_peer:
            workers["peer"] = sides.peer_embedded(plan.segment, plan.buffer)
        for label, size in plan.sizes().items():
            measures = {name: batches(w, size, plan) for name, w in workers.items()}
            measures["copy_1"] = _copies(workers["ours"], size, 1)
            samples = alternate(measures, plan.rounds)
            _show(f"one process, batches of 128 × {label}, GiB/s", samples, ("put", "get"))
            found |= _rates("one_process", label, samples)
        singles = alternate({name: _singles(w, plan) for name, w in workers.items()}, plan.rounds)
    _show("one process, single calls of 4 KiB, µs", singles, _TIMES, lower=True)
    found |= _raw("single_4k", singles, _TIMES)
    if "peer" in singles:
        found |= {
            f"single_{call}_4k_{p}_vs_peer": sooner(singles["ours"], singles["peer"], f"{call}_{p}")
            for call in ("put", "get")
            for p in ("p50", "p99")
        }
    return found


def existence(plan: Plan) -> Figures:
    """Probes: our home messenger over its socket, and the peer's master over its own; and ours inside one process."""
    with Sides(plan.peer) as sides:
        workers = {"ours": sides.ours(plan.segment, plan.buffer)}
        if sides.has_peer:
            workers["peer"] = sides.peer(plan.segment, plan.buffer)
        workers["ours_one_process"] = sides.ours_embedded(plan.segment, plan.buffer)
        samples = alternate({name: _probes(w, plan) for name, w in workers.items()}, plan.rounds)
    _show(f"existence, keys/s: one a call, and {_KEYS} a call", samples, ("single", "batch"), digits=0)
    found = _raw("exist", samples, ("single", "batch"))
    if "peer" in samples:
        found["exist_vs_peer"] = faster(samples["ours"], samples["peer"], "single")
        found["batch_exist_vs_peer"] = faster(samples["ours"], samples["peer"], "batch")
    return found


def views(plan: Plan) -> Figures:
    """Open and close of a zero-copy read view, between two processes; and inside one."""
    sizes = (4 << 10, 1 << 20, (8 if plan.quick else 64) << 20)
    with Sides(None) as sides:
        workers = {
            "ours": sides.ours(plan.segment, plan.buffer),
            "ours_one_process": sides.ours_embedded(plan.segment, plan.buffer),
        }
        samples = alternate({name: _views(w, sizes) for name, w in workers.items()}, plan.rounds)
    names = tuple(str(s) for s in sizes)
    _show("zero-copy read view, open and close, p50 in µs, by size in bytes", samples, names, lower=True)
    medians = {n: samples["ours"].median(n) for n in names}
    inside = max(samples["ours_one_process"].median(n) for n in names)
    return {"view_p50_us": max(medians.values()), "view_p50_us_by_size": medians, "view_p50_us_one_process": inside}


_TIMES = ("put_p50", "put_p99", "get_p50", "get_p99")


def batches(worker: Worker, size: int, plan: Plan) -> Measure:
    """Rates of batched puts and gets by this client."""
    passes = 1 if plan.quick else 2
    return lambda n: worker.do("batch", label=f"b{size}", size=size, passes=passes, first=n * passes)


def _views(worker: Worker, sizes: Sequence[int]) -> Measure:
    return lambda _: worker.do("view", sizes=sizes, count=300)


def _copies(worker: Worker, size: int, threads: int) -> Measure:
    return lambda _: worker.do("copy", size=size, threads=threads)


def _singles(worker: Worker, plan: Plan) -> Measure:
    count = 200 if plan.quick else 1000
    return lambda n: worker.do("single", label="s", size=_SINGLE, count=count, first=n)


def _probes(worker: Worker, plan: Plan) -> Measure:
    repeats = 4 if plan.quick else 20
    return lambda n: worker.do("exist", label=f"e{n}", count=_KEYS, repeats=repeats)


def _rates(mode: str, label: str, samples: Mapping[str, Samples]) -> Figures:
    """Ratios of ours to each other row, and each row's own rates."""
    found: Figures = {}
    for call in ("put", "get"):
        for name, row in samples.items():
            found[f"{mode}_{call}_{label}_gib_s_{name}"] = row.median(call)
        for name, other in (("peer", "peer"), ("peer_shm", "peer_shm"), ("copy", "copy_1")):
            if other in samples:
                found[f"{mode}_{call}_{label}_vs_{name}"] = faster(samples["ours"], samples[other], call)
    return found


def _raw(mode: str, samples: Mapping[str, Samples], names: tuple[str, ...]) -> Figures:
    return {f"{mode}_{n}_{side}": row.median(n) for side, row in samples.items() for n in names}


def _show(
    title: str, samples: Mapping[str, Samples], names: tuple[str, ...], *, lower: bool = False, digits: int = 2
) -> None:
    """A row per side: median (least–most), and how many times as fast ours is."""
    ratio = sooner if lower else faster
    rows = []
    for side, row in samples.items():
        cells = [(row.text(n, digits), f"{ratio(samples['ours'], row, n):.2f}×") for n in names]
        rows.append((side, *(c for cell in cells for c in cell)))
    figures.show(title, rows, ("side", *(c for n in names for c in (n, "ours ÷"))))
