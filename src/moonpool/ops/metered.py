"""A service whose requests are counted and timed, by verb."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.errors import MoonpoolError
from moonpool.wire.auth import Peer
from moonpool.wire.messages import Message
from moonpool.wire.rpc import Service

BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)


class _Verb:
    __slots__ = ("buckets", "errors", "lock", "seconds")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.buckets = [0] * (len(BUCKETS_S) + 1)
        self.seconds = 0.0
        self.errors = 0


class Metered(Service, Collector):
    """Goes around `service`; half a microsecond a request."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.requests = service.requests
        self._verbs: dict[type, _Verb] = {}

    def open_session(self) -> int:
        return self._service.open_session()

    def identify(self, session: int, peer: Peer) -> None:
        self._service.identify(session, peer)

    def close_session(self, session: int) -> None:
        self._service.close_session(session)

    def descriptor(self, request: Any) -> int | None:
        return self._service.descriptor(request)

    def handle(self, session: int, request: Any) -> Message:
        verb = self._verbs.get(type(request)) or self._verbs.setdefault(type(request), _Verb())
        start = time.perf_counter()
        try:
            return self._service.handle(session, request)
        except MoonpoolError:
            verb.errors += 1
            raise
        finally:
            spent = time.perf_counter() - start
            with verb.lock:
                verb.buckets[bisect_left(BUCKETS_S, spent)] += 1
                verb.seconds += spent

    def collect(self) -> Iterator[Metric]:
        """A request that waits for events on purpose (`NextEvents`) counts with its wait."""
        times = HistogramMetricFamily("moonpool_request_seconds", "Time to answer a request", labels=["verb"])
        errors = CounterMetricFamily("moonpool_request_errors", "Requests answered with an error", labels=["verb"])
        for kind, verb in sorted(self._verbs.items(), key=lambda v: v[0].__name__):
            with verb.lock:
                counts, seconds = list(accumulate(verb.buckets)), verb.seconds
            bounds = [*map(str, BUCKETS_S), "+Inf"]
            times.add_metric([kind.__name__], list(zip(bounds, counts, strict=True)), sum_value=seconds)
            errors.add_metric([kind.__name__], verb.errors)
        yield times
        yield errors
