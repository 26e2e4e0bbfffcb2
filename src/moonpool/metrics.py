"""Figures for `/metrics`, read at each scrape. Every family has its help text here, and `docs/operations.md` lists them all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.store.base import KVPool
from moonpool.store.host import MessengerHost
from moonpool.store.master.service import MasterService
from moonpool.types import PoolStats

if TYPE_CHECKING:  # a messenger's metrics need no torch
    from moonpool.c2c.converter import Converter, ConverterStats

GAUGES = {
    "capacity": "Bytes of memory lent to the pool",
    "used": "Bytes of memory taken: objects, and reservations being written",
    "largest_free": "Bytes of the largest free piece: nothing larger fits without an eviction",
    "objects": "Objects in memory",
    "converted_objects": "Of those, pages converted from another model's",
    "reads_open": "Read leases open now; each pins its objects",
    "writes_open": "Reservations neither committed nor revoked",
    "disk_used": "Bytes that the disk tier takes",
    "disk_objects": "Objects in the disk tier",
}
COUNTERS = {
    "puts": "Objects stored",
    "hits": "Keys asked for and found, in memory or on disk",
    "misses": "Keys asked for and not found",
    "evictions": "Objects evicted from memory",
    "revoked": "Reservations that never became objects: revoked, out of time, or their writer died",
    "events_dropped": "Events that a slow subscriber lost",
    "disk_reads": "Objects read from the disk tier",
    "disk_writes": "Objects written to the disk tier",
    "disk_failures": "Disk writes that failed and reads that found damage",
    "lost_unspilled": "Objects evicted before the disk tier had a copy",
}
_RULE_STATES = ("loading", "ready", "refused", "disabled")
_VERDICTS = ("passed", "forced", "refused")


def _stats_families(prefix: str, stats: PoolStats, labels: dict[str, str]) -> Iterator[Metric]:
    names, values = list(labels), list(labels.values())
    for family, helps in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for field, text in helps.items():
            metric = family(f"{prefix}_{field}", text, labels=names)
            metric.add_metric(values, getattr(stats, field))
            yield metric


class PoolMetrics(Collector):
    """`moonpool_pool_*`: the pool as one client sees it, all messengers added up."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        yield from _stats_families("moonpool_pool", self._pool.stats(), {})


class MessengerMetrics(Collector):
    """`moonpool_messenger_*`: one messenger, from inside."""

    def __init__(self, host: MessengerHost) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        info = self._host.info()
        labels = {"messenger": info.name}
        yield from _stats_families("moonpool_messenger", self._host.service.stats(), labels)
        yield _one("moonpool_messenger_joined", "1 while the master knows this messenger", self._host.joined, labels)
        yield _one("moonpool_messenger_draining", "1 while it takes nothing new", info.draining, labels)


class MasterMetrics(Collector):
    """`moonpool_master_*`: the index, the messengers that are alive, the tenants that have a quota."""

    def __init__(self, service: MasterService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        members = self._service.messengers()
        yield _one("moonpool_master_messengers", "Messengers alive", len(members))
        yield _one("moonpool_master_keys", "Keys in the index", self._service.keys())
        for field, text in (("capacity", GAUGES["capacity"]), ("used", GAUGES["used"]), ("objects", GAUGES["objects"])):
            metric = GaugeMetricFamily(
                f"moonpool_master_messenger_{field}", f"{text}, as of the last heartbeat", labels=["messenger"]
            )
            for info in members:
                metric.add_metric([info.name], getattr(info, field))
            yield metric
        quotas = {t: q for t, q in self._service.quotas().items() if q[0] >= 0}  # others are anybody's to invent
        for place, name, text in ((0, "quota", "Bytes that a tenant may hold"), (1, "used", "Bytes that it holds")):
            metric = GaugeMetricFamily(f"moonpool_master_tenant_{name}", text, labels=["tenant"])
            for tenant, figures in quotas.items():
                metric.add_metric([tenant], figures[place])
            yield metric


def _one(name: str, text: str, value: float, labels: dict[str, str] | None = None) -> Metric:
    metric = GaugeMetricFamily(name, text, labels=list(labels or {}))
    metric.add_metric(list((labels or {}).values()), float(value))
    return metric


class ConverterMetrics(Collector):
    """`moonpool_c2c_*`: pages made and rejected (by reason), seconds, and the state of each rule. A rule that is `ready` while
    `moonpool_c2c_pages_total` does not move is one that matches nothing."""

    def __init__(self, converter: Converter) -> None:
        self._converter = converter

    def collect(self) -> Iterator[Metric]:
        stats = self._converter.stats()
        yield CounterMetricFamily("moonpool_c2c_pages", "Pages converted", value=stats.converted_pages)
        yield CounterMetricFamily("moonpool_c2c_tokens", "Tokens converted", value=stats.converted_tokens)
        yield CounterMetricFamily("moonpool_c2c_seconds", "Time spent converting", value=stats.seconds)
        yield GaugeMetricFamily("moonpool_c2c_waiting_pages", "Pages queued", value=stats.waiting_pages)
        rejected = CounterMetricFamily("moonpool_c2c_rejected_pages", "Pages not converted", labels=["reason"])
        for reason, count in sorted(stats.rejected.items()):
            rejected.add_metric([reason], count)
        yield rejected
        yield _states(stats)
        yield _verdicts(stats)


def _verdicts(stats: ConverterStats) -> Metric:
    verdicts = GaugeMetricFamily(
        "moonpool_c2c_rule_gate", "1 for what the gate made of a rule's bundle", labels=["rule", "verdict"]
    )
    for rule in stats.rules:
        for verdict in _VERDICTS:
            verdicts.add_metric([rule.name, verdict], float(rule.gate == verdict))
    return verdicts


def _states(stats: ConverterStats) -> Metric:
    states = GaugeMetricFamily("moonpool_c2c_rule", "1 for the state that a rule is in", labels=["rule", "state"])
    for rule in stats.rules:
        for state in _RULE_STATES:
            states.add_metric([rule.name, state], float(rule.state == state))
    return states
