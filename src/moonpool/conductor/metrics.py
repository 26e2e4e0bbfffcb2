"""The conductor's figures for Prometheus, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from moonpool.conductor.service import Conductor


class ConductorMetrics(Collector):
    def __init__(self, conductor: Conductor) -> None:
        self._c = conductor

    def collect(self) -> Iterator[Metric]:
        c = self._c
        requests = CounterMetricFamily("moonpool_conductor_requests", "Requests by how they ended.", labels=["outcome"])
        for outcome, count in c.outcomes.items():
            requests.add_metric([outcome], count)
        yield requests
        tokens = CounterMetricFamily("moonpool_conductor_prompt_tokens", "Tokens of prompts.", labels=["kind"])
        tokens.add_metric(["cached"], c.cached_tokens)
        tokens.add_metric(["all"], c.prompt_tokens)
        yield tokens
        yield CounterMetricFamily(
            "moonpool_conductor_saved_prefill_seconds",
            "Prefill that caches made needless, as predicted.",
            c.saved_prefill_s,
        )
        yield from self._instances()
        yield from self._models()

    def _instances(self) -> Iterator[Metric]:
        names = ["instance", "model"]
        up = GaugeMetricFamily("moonpool_conductor_instance_up", "1: takes requests.", labels=names)
        queue = GaugeMetricFamily(
            "moonpool_conductor_queue_seconds", "Predicted work before a new request.", labels=names
        )
        batch = GaugeMetricFamily(
            "moonpool_conductor_decode_batch", "Requests that decode there, or will.", labels=names
        )
        flight = GaugeMetricFamily("moonpool_conductor_in_flight", "Requests through this conductor.", labels=names)
        now = self._c.clock()
        for i in self._c.registry:
            ledger, labels = self._c.model(i.entry.model).cluster.ledger, [i.id, i.entry.model]
            up.add_metric(labels, float(i.state == "ready" and i.breaker.admits(now)))
            queue.add_metric(labels, ledger.queue_s(i.id, now))
            batch.add_metric(labels, ledger.batch(i.id))
            flight.add_metric(labels, i.in_flight)
        yield from (up, queue, batch, flight)

    def _models(self) -> Iterator[Metric]:
        leases = GaugeMetricFamily("moonpool_conductor_leases", "Requests that are booked.", labels=["model"])
        blocks = GaugeMetricFamily("moonpool_conductor_index_blocks", "Blocks in the prefix index.", labels=["model"])
        size = GaugeMetricFamily("moonpool_conductor_index_bytes", "Of the prefix index.", labels=["model"])
        for name, model in self._c.models.items():
            leases.add_metric([name], len(model.cluster.ledger))
            blocks.add_metric([name], model.cluster.index.blocks)
            size.add_metric([name], model.cluster.index.nbytes)
        yield from (leases, blocks, size)
