"""Prometheus metrics of a server's instances, in a registry of their own. Read from `Instance.stats()` at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.engine.instance import Instance
from moonpool.engine.request import GenerateResult
from moonpool.engine.stats import EngineStats

_GAUGES = frozenset({"waiting", "running"})
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TBT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class _Figures(Collector):
    def __init__(self, instances: Mapping[str, Instance]) -> None:
        self._instances = instances

    def collect(self) -> Iterator[Metric]:
        figures = {name: instance.stats() for name, instance in self._instances.items()}
        for field in EngineStats.__struct_fields__:
            name, text = f"moonpool_engine_{_metric(field)}", f"EngineStats.{field}"
            family: GaugeMetricFamily | CounterMetricFamily
            if field in _GAUGES:
                family = GaugeMetricFamily(name, text, labels=["model"])
            else:
                family = CounterMetricFamily(name, text, labels=["model"])
            for model, stats in figures.items():
                family.add_metric([model], getattr(stats, field))
            yield family


def _metric(field: str) -> str:
    return f"{field[:-2]}_seconds" if field.endswith("_s") else field


class EngineMetrics:
    """`observe` each result; `text` is the /metrics body."""

    def __init__(self, instances: Mapping[str, Instance], collectors: Sequence[Collector] = ()) -> None:
        self._registry = CollectorRegistry()
        for collector in (_Figures(instances), *collectors):
            self._registry.register(collector)
        self._ttft = self._histogram("moonpool_ttft_seconds", "Submission to first token", _TTFT_BUCKETS)
        self._tbt = self._histogram("moonpool_tbt_seconds", "Mean time between an answer's tokens", _TBT_BUCKETS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model"], buckets=buckets, registry=self._registry)

    def observe(self, model: str, result: GenerateResult) -> None:
        if result.timing.ttft:
            self._ttft.labels(model).observe(result.timing.ttft)
        if result.usage.completion > 1:
            self._tbt.labels(model).observe(result.timing.decode / (result.usage.completion - 1))

    def text(self) -> bytes:
        return generate_latest(self._registry)
