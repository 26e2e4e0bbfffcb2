"""Prometheus metrics of a server's instances, in a registry of their own. Read from `Instance.stats()` at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
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


class _Rules(Collector):
    """`moonpool_engine_rule_*`: the answers over each rule's pages, and what their shadow checks found."""

    def __init__(self, instances: Mapping[str, Instance]) -> None:
        self._instances = instances

    def collect(self) -> Iterator[Metric]:
        labels = ["model", "rule"]
        answers = CounterMetricFamily(
            "moonpool_engine_rule_requests", "Answers over a rule's converted pages", labels=[*labels, "forced"]
        )
        checks = CounterMetricFamily("moonpool_engine_shadow_checks", "Of these, checked against native", labels=labels)
        agreed = CounterMetricFamily("moonpool_engine_shadow_agreed", "Checks with the same first token", labels=labels)
        disabled = GaugeMetricFamily("moonpool_engine_rule_disabled", "1 while its pages are not taken", labels=labels)
        kl = HistogramMetricFamily("moonpool_engine_shadow_kl", "KL of the first token, nats", labels=["model"])
        for model, instance in self._instances.items():
            forced, off = instance.forced_rules(), instance.disabled_rules()
            for rule in instance.rules():
                names = [model, rule.name]
                answers.add_metric([*names, str(rule.digest in forced).lower()], rule.requests)
                checks.add_metric(names, rule.checks)
                agreed.add_metric(names, rule.agreed)
                disabled.add_metric(names, float(rule.digest in off))
            if histogram := instance.shadow_histogram():
                kl.add_metric([model], *histogram)
        yield from (answers, checks, agreed, disabled, kl)


def _metric(field: str) -> str:
    return f"{field[:-2]}_seconds" if field.endswith("_s") else field


class EngineMetrics:
    """`observe` each result; `text` is the /metrics body."""

    def __init__(self, instances: Mapping[str, Instance], collectors: Sequence[Collector] = ()) -> None:
        self._registry = CollectorRegistry()
        for collector in (_Figures(instances), _Rules(instances), *collectors):
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
