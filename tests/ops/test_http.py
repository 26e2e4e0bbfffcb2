"""Health and metrics over HTTP."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from moonpool.errors import NotFound
from moonpool.metrics import COUNTERS, GAUGES, MasterMetrics, MessengerMetrics
from moonpool.ops.http import HealthServer, health_app
from moonpool.ops.metered import Metered
from moonpool.ops.serving import why_not_ready
from moonpool.store.client import PoolClient
from moonpool.store.host import MessengerHost
from moonpool.store.master.service import MasterService
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.types import PoolStats
from moonpool.wire import messages as m
from moonpool.wire.auth import Security
from moonpool.wire.rpc import LocalChannel, Server
from tests.ops.support import MIB, small_pool


def text_of(*collectors: Collector) -> str:
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry).decode()


def value(text: str, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
    assert found, series
    return float(found[1])


def test_health_readiness_and_metrics_while_it_serves_and_drains(tmp_path: Path) -> None:
    with no_leaks(), small_pool(tmp_path, messengers=1) as small:
        host = small.hosts[0]
        assert eventually(lambda: host.joined)
        app = health_app(lambda: why_not_ready(host), [MessengerMetrics(host)])
        with HealthServer(app, "127.0.0.1:0", Security(), "test") as server, httpx.Client(base_url=server.url) as http:
            assert http.get("/healthz").status_code == 200
            assert http.get("/readyz").status_code == 200
            small.client().put("key", b"x" * 1000)
            assert value(http.get("/metrics").text, 'moonpool_messenger_puts_total{messenger="m0"}') == 1
            host.service.drain(True)
            answer = http.get("/readyz")
            assert (answer.status_code, answer.text) == (503, "not ready: draining\n")
            assert value(http.get("/metrics").text, 'moonpool_messenger_draining{messenger="m0"}') == 1
            assert http.get("/healthz").status_code == 200, "alive, though it takes nothing new"
            assert http.post("/metrics").status_code == 405
            assert http.get("/other").status_code == 404


def test_a_messenger_that_its_master_does_not_know_is_not_ready(tmp_path: Path) -> None:
    master = tmp_path / "master"
    with no_leaks():
        host = MessengerHost(name="m0", socket=str(tmp_path / "m0"), capacity=MIB, master=str(master))
        try:
            assert "does not know" in why_not_ready(host)
            server = Server(str(master), MasterService(), name="master")
            try:
                assert eventually(lambda: why_not_ready(host) == "")
            finally:
                server.close()
            assert eventually(lambda: "does not know" in why_not_ready(host)), "the master went away"
        finally:
            host.close()


def test_a_messenger_without_a_master_is_ready(tmp_path: Path) -> None:
    host = MessengerHost(name="m0", socket=str(tmp_path / "m0"), capacity=MIB)
    try:
        assert why_not_ready(host) == ""
    finally:
        host.close()


def test_every_figure_of_a_messenger_has_a_series_and_every_series_a_help_text(tmp_path: Path) -> None:
    assert GAUGES.keys() | COUNTERS.keys() == set(PoolStats.__struct_fields__)
    with small_pool(tmp_path, messengers=1) as small:
        metered = Metered(small.service)
        channel = LocalChannel(metered)
        channel.call(m.ListMessengers(), m.Messengers)
        channel.close()
        families = list(
            text_string_to_metric_families(
                text_of(MessengerMetrics(small.hosts[0]), MasterMetrics(small.service), metered)
            )
        )
    assert len(families) > 25
    for family in families:
        assert family.name.startswith("moonpool_")
        assert len(family.documentation) > 8, family.name


def test_requests_are_counted_by_verb_with_their_errors_and_times(tmp_path: Path) -> None:
    made: list[Metered] = []

    def meter(service: object) -> Metered:
        made.append(Metered(service))  # type: ignore[arg-type]
        return made[0]

    host = MessengerHost(name="m0", socket=str(tmp_path / "m0"), capacity=MIB, meter=meter)
    try:
        with PoolClient.connect(messenger=str(tmp_path / "m0")) as pool:
            pool.put("key", b"x" * 100)
            for _ in range(3):
                pool.is_exist("key")
            assert pool.get("key") == b"x" * 100, "descriptors still come along"
        text = text_of(*made)
    finally:
        host.close()
    assert value(text, 'moonpool_request_seconds_count{verb="Exist"}') == 3
    assert value(text, 'moonpool_request_seconds_bucket{le="+Inf",verb="Exist"}') == 3
    assert 0 < value(text, 'moonpool_request_seconds_sum{verb="Exist"}') < 1
    assert value(text, 'moonpool_request_errors_total{verb="Exist"}') == 0


def test_a_refused_request_counts_as_an_error(tmp_path: Path) -> None:
    metered = Metered(MasterService())
    session = metered.open_session()
    with pytest.raises(NotFound):
        metered.handle(session, m.Publish("nobody", [], []))
    metered.close_session(session)
    assert value(text_of(metered), 'moonpool_request_errors_total{verb="Publish"}') == 1


def test_the_masters_metrics_name_messengers_and_tenants_with_a_quota(tmp_path: Path) -> None:
    with small_pool(tmp_path) as small:
        small.client().set_quota("t", 5 * MIB)
        small.client(tenant="t").put("key", b"x" * 1000)
        small.client(tenant="invented").put("key", b"x" * 1000)
        assert eventually(lambda: small.service.quotas().get("t") == (5 * MIB, 1000))
        assert eventually(lambda: small.service.keys() == 2)
        text = text_of(MasterMetrics(small.service))
    assert value(text, "moonpool_master_messengers") == 2
    assert value(text, "moonpool_master_keys") == 2
    assert value(text, 'moonpool_master_messenger_capacity{messenger="m1"}') == 8 * MIB
    assert value(text, 'moonpool_master_tenant_used{tenant="t"}') == 1000
    assert "invented" not in text, "clients cannot make series"
