"""Tables of simulated clusters: which cases each needs, and what it makes of their summaries."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from moonpool.conductor.simulate import paper
from moonpool.conductor.simulate.case import Case, Summary
from moonpool.conductor.simulate.table import Table, Value, beside
from moonpool.conductor.types import SLO

STRATEGIES = ("random", "least_requests", "least_work", "local", "kvcache")
"""The paper's four; its load balancing by requests and by work."""
OTHERS = ("round_robin", "power_of_two", "session", "dynamo", "sglang", "preble", "llmd")
SETTINGS = ((5, 1.0), (6, 1.0), (8, 1.0), (8, 1.3), (8, 2.0))
"""Prefill nodes and speed."""
CLOSEST = 6
"""Nodes at which the load is most like the paper's in its Fig. 5."""
OVERLOADS = ((8, 1, 2.0), (8, 2, 4.0))
"""Prefill nodes, decode nodes, speed: decode is short, both are."""
STAGES = ("baseline", "early", "predict")
SPLITS = ((8, 8), (5, 11), (11, 5))
SPLIT_SLO = SLO(ttft_s=10.0, tbt_s=0.1)

Summaries = Mapping[Case, Summary]


def strategy_case(path: str, policy: str, nodes: int, speed: float) -> Case:
    return Case(trace=path, policy=policy, prefill=nodes, speed=speed)


def overload_case(path: str, stage: str, setting: tuple[int, int, float]) -> Case:
    prefill, decode, speed = setting
    return Case(trace=path, prefill=prefill, decode=decode, speed=speed, admission=stage)


def fig_10_case(path: str, policy: str) -> Case:
    return Case(trace=path, policy=policy, prefill=10, one_token=True)


def nic_case(path: str, gbit_s: int) -> Case:
    return Case(trace=path, nic_gbit_s=float(gbit_s))


def split_case(path: str, prefill: int, decode: int) -> Case:
    return Case(trace=path, prefill=prefill, decode=decode, slo=SPLIT_SLO)


def replica_case(path: str, watched: tuple[int, ...], replicate: bool) -> Case:
    return Case(trace=path, watched=watched, replicate=replicate)


class Plan(msgspec.Struct, frozen=True):
    """What the tables are made of: paths of the traces by name, and the blocks whose replicas are counted."""

    traces: dict[str, str]
    watched: dict[str, tuple[int, ...]]

    def cases(self) -> list[Case]:
        found: list[Case] = []
        for name, path in self.traces.items():
            settings = SETTINGS if name == "conversation" else ((CLOSEST, 1.0), (8, 1.0))
            found += [strategy_case(path, p, *s) for s in settings for p in STRATEGIES]
            found += [strategy_case(path, p, CLOSEST, 1.0) for p in OTHERS]
            found += [fig_10_case(path, p) for p in ("random", "local", "kvcache")]
            found += [replica_case(path, self.watched[name], r) for r in (False, True)]
            if name == "synthetic":
                found += [nic_case(path, rate) for rate in paper.FIG_13]
                found += [split_case(path, *s) for s in SPLITS]
            else:
                found += [overload_case(path, stage, s) for s in OVERLOADS for stage in STAGES]
        return list(dict.fromkeys(found))

    def tables(self, runs: Summaries) -> list[Table]:
        tables: list[Table] = []
        for name, path in self.traces.items():
            tables += [_strategies(name, path, runs), _routers(name, path, runs)]
        tables += [self._fig_10(runs), self._prefill(runs), self._tbt(runs), self._replicas(runs)]
        for name, path in self.traces.items():
            tables += [_nic(path, runs), _splits(path, runs)] if name == "synthetic" else [_overload(path, runs)]
        return tables

    def _fig_10(self, runs: Summaries) -> Table:
        rows: list[tuple[Value, ...]] = []
        for name, path in self.traces.items():
            for policy in ("random", "local", "kvcache"):
                run = runs[fig_10_case(path, policy)]
                hit, seconds = paper.FIG_10.get(name, {}).get(policy, (None, None))
                rows.append((f"{name}, {policy}", *beside(run.hit, hit), *beside(run.prefill_s, seconds)))
        return Table(
            "fig10_local_global",
            "Local and global cache, 10 prefill nodes (Fig. 10)",
            ("", "hit", "paper", "difference", "prefill, node s", "paper", "difference"),
            rows,
            "The paper's local router finds less than a cache-aware one and more than a random one.",
        )

    def _prefill(self, runs: Summaries) -> Table:
        rows: list[tuple[Value, ...]] = []
        for name, path in self.traces.items():
            theirs = paper.FIG_8.get(name, {})
            ours = runs[strategy_case(path, "kvcache", 8, 1.0)].prefill_s
            rows.append((name, *beside(ours, theirs.get("mooncake")), theirs.get("vllm")))
        columns = ("trace", "ours, node s", "paper's Mooncake", "difference", "paper's vLLM")
        return Table("fig8_prefill", "Prefill time of a request, kvcache on 8 nodes (Fig. 8)", columns, rows)

    def _tbt(self, runs: Summaries) -> Table:
        rows: list[tuple[Value, ...]] = []
        for name, path in self.traces.items():
            within = runs[strategy_case(path, "kvcache", 8, 1.0)].tbt_within
            theirs = paper.TBT_WITHIN.get(name, {})
            rows += [(f"{name}, {ms} ms", *beside(share, theirs.get(ms))) for ms, share in within.items()]
        return Table(
            "tbt_within",
            "Share of requests within a limit of time between tokens, 8 + 8 nodes (Figs. 1 and 7)",
            ("", "ours", "paper", "difference"),
            rows,
            "The decode step is a model (12.5 ms, 0.15 ms a request, KV at 9.6 TB/s): lighter than what the paper ran.",
        )

    def _replicas(self, runs: Summaries) -> Table:
        rows: list[tuple[Value, ...]] = []
        for name, path in self.traces.items():
            for i, rank in enumerate(paper.FIG_11_RANKS):
                most = [
                    max(
                        (counts[i] for _, counts in runs[replica_case(path, self.watched[name], r)].replicas), default=0
                    )
                    for r in (False, True)
                ]
                theirs = paper.FIG_11.get(name, (None, None, None))[i]
                rows.append((f"{name}, {rank}th block", *most, theirs, difference_of(most[1], theirs)))
        columns = ("", "most replicas, transfers alone", "with the replication rule", "paper", "difference")
        return Table("fig11_replicas", "Replicas of hot blocks on 8 prefill nodes (Fig. 11)", columns, rows)


def difference_of(ours: int, theirs: int | None) -> int | None:
    return None if theirs is None else ours - theirs


def _strategies(name: str, path: str, runs: Summaries) -> Table:
    rows: list[tuple[Value, ...]] = []
    settings = SETTINGS if name == "conversation" else ((CLOSEST, 1.0), (8, 1.0))
    for nodes, speed in settings:
        for policy in STRATEGIES:
            run = runs[strategy_case(path, policy, nodes, speed)]
            theirs = paper.FIG_5.get(policy) if (name, nodes, speed) == ("conversation", CLOSEST, 1.0) else None
            t = run.ttft
            rows.append(
                (
                    f"{nodes} nodes, {speed:g}x, {policy}",
                    *beside(t.mean, theirs[0] if theirs else None),
                    *(t.q1, t.median, t.q3, t.p90, t.p99),
                    *(run.within_ttft, run.hit, run.prefill_s, run.busiest),
                )
            )
    return Table(
        f"ttft_by_strategy_{name}",
        f"Time to first token in s by strategy, {name} trace (Fig. 5)",
        ("", "mean", "paper", "diff.", "q1", "median", "q3", "p90", "p99", "<= 30 s", "hit", "prefill s", "max/mean"),
        rows,
        "The paper ran 16 nodes; 6 prefill nodes come closest to its load.",
    )


def _routers(name: str, path: str, runs: Summaries) -> Table:
    rows: list[tuple[Value, ...]] = []
    for policy in (*STRATEGIES, *OTHERS):
        run = runs[strategy_case(path, policy, CLOSEST, 1.0)]
        t = run.ttft
        rows.append((policy, t.mean, t.median, t.p90, t.p99, run.hit, run.prefill_s, run.busiest))
    rows.sort(key=lambda row: float(row[1] or 0.0), reverse=True)
    return Table(
        f"routers_{name}",
        f"All policies, {CLOSEST} prefill nodes, {name} trace: time to first token in s",
        ("policy", "mean", "median", "p90", "p99", "hit", "prefill s", "max/mean"),
        rows,
    )


def _nic(path: str, runs: Summaries) -> Table:
    rows: list[tuple[Value, ...]] = []
    for rate, (ttft, _) in paper.FIG_13.items():
        run = runs[nic_case(path, rate)]
        rows.append((f"{rate} Gb/s", *beside(run.ttft.mean, ttft), run.ttft.p90, run.hit))
    columns = ("NIC", "mean TTFT, s", "paper", "difference", "p90", "hit")
    return Table("fig13_nic", "Time to first token by NIC rate, synthetic trace, 8 + 8 nodes (Fig. 13)", columns, rows)


def _splits(path: str, runs: Summaries) -> Table:
    rows: list[tuple[Value, ...]] = []
    for prefill, decode in SPLITS:
        run = runs[split_case(path, prefill, decode)]
        rows.append(
            (f"{prefill}P + {decode}D", *beside(run.good, paper.FIG_15[prefill, decode]), run.ttft.mean, run.tbt.p90)
        )
    return Table(
        "fig15_split",
        "Share of requests within TTFT 10 s and TBT 100 ms by split, synthetic trace (Fig. 15)",
        ("split", "ours", "paper", "difference", "mean TTFT, s", "p90 TBT, s"),
        rows,
    )


def _overload(path: str, runs: Summaries) -> Table:
    rows: list[tuple[Value, ...]] = []
    for setting in OVERLOADS:
        for stage in STAGES:
            run = runs[overload_case(path, stage, setting)]
            prefill, decode, speed = setting
            rows.append(
                (
                    f"{prefill}P + {decode}D, {speed:g}x, {stage}",
                    run.refused + run.refused_after,
                    paper.TABLE_3[stage],
                    run.refused,
                    run.refused_after,
                    run.wasted_s,
                    run.done,
                    run.good,
                    run.correlation,
                )
            )
    return Table(
        "overload",
        "Overload by admission (section 7 of the arXiv paper)",
        (
            "",
            "refused",
            "paper's",
            "on arrival",
            "after prefill",
            "wasted prefill, node s",
            "done",
            "within both limits",
            "correlation of loads",
        ),
        rows,
        "The paper's counts are of 8 + 8 nodes and another trace: their order compares, not the numbers.",
    )
