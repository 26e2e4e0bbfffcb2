"""The pool's and the converter's figures for `/metrics`, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.c2c.converter import Converter, ConverterStats
from moonpool.store.base import KVPool
from moonpool.types import PoolStats

_POOL_COUNTERS = frozenset({"puts", "hits", "misses", "evictions", "revoked", "events_dropped"})
_RULE_STATES = ("loading", "ready", "refused")


class PoolMetrics(Collector):
    """`moonpool_pool_*`: one family per field of `PoolStats`."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        stats = self._pool.stats()
        for field in PoolStats.__struct_fields__:
            family = CounterMetricFamily if field in _POOL_COUNTERS else GaugeMetricFamily
            yield family(f"moonpool_pool_{field}", f"PoolStats.{field}", value=getattr(stats, field))


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


def _states(stats: ConverterStats) -> Metric:
    states = GaugeMetricFamily("moonpool_c2c_rule", "1 for the state that a rule is in", labels=["rule", "state"])
    for rule in stats.rules:
        for state in _RULE_STATES:
            states.add_metric([rule.name, state], float(rule.state == state))
    return states
