"""The peer's HTTP pages: the master's administration (default port 9003) and a client's health and figures (9300)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from moonpool.errors import MoonpoolError
from moonpool.integrations.mooncake_api.codes import Code, code_of
from moonpool.store.base import KVPool
from moonpool.types import MessengerInfo, Replica

Pool = Callable[[], KVPool]
Members = Callable[[], Sequence[MessengerInfo]]
"""The pool, and who belongs to it, at the time of a request. They raise MoonpoolError."""


def admin_app(pool: Pool, members: Members, leader: str) -> Starlette:
    """`leader` is the master's own address."""

    def get_all_segments(request: Request) -> Response:
        return _lines(m.name for m in members())

    def get_all_keys(request: Request) -> Response:
        return _lines(pool().keys())

    def query_segment(request: Request) -> Response:
        name = request.query_params.get("segment", "")
        found = next((m for m in members() if m.name == name), None)
        if found is None:
            return PlainTextResponse("Failed to query segment", 500)
        return PlainTextResponse(f"{name}\nUsed(bytes): {found.used}\nCapacity(bytes) : {found.capacity}\n")

    def get_segments_detail(request: Request) -> Response:
        return JSONResponse(
            [{"name": m.name, "used": m.used, "capacity": m.capacity, "objects": m.objects} for m in members()]
        )

    def query_key(request: Request) -> Response:
        replicas = pool().replicas([request.query_params.get("key", "")])[0]
        if not replicas:
            error = {"success": False, "error_code": int(Code.NOT_FOUND), "error_message": "OBJECT_NOT_FOUND"}
            return JSONResponse(error, 404)
        return JSONResponse({"success": True, "data": [_buffer(r) for r in replicas if r.tier == "memory"]})

    def batch_query_keys(request: Request) -> Response:
        keys = [k for k in request.query_params.get("keys", "").split(",") if k]
        if not keys:
            return JSONResponse({"success": False, "error": "No keys provided. Use ?keys=key1,key2,..."}, 400)
        found = zip(keys, pool().replicas(keys), strict=True)
        return JSONResponse({"success": True, "data": {key: _found(replicas) for key, replicas in found}})

    def health(request: Request) -> Response:
        state = {"role": "leader", "ha_state": "standalone", "service_ready": True}
        return JSONResponse({"status": "ok", **state, "leader_address": leader, "view_version": 0})

    def role(request: Request) -> Response:
        return PlainTextResponse("leader")

    pages = [
        get_all_segments,
        get_all_keys,
        query_segment,
        get_segments_detail,
        query_key,
        batch_query_keys,
        health,
        role,
    ]
    return _app(pages, Segments(members))


def client_app(health_check: Callable[[], int], members: Members) -> Starlette:
    """`health_check` answers as the store's does."""

    def health(request: Request) -> Response:
        code = health_check()
        return JSONResponse({"status": "unhealthy" if code else "healthy", "code": code}, 503 if code else 200)

    return _app([health], Segments(members))


class Segments(Collector):
    """The peer's names for a pool's capacity, use and objects, in sum and by segment."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def collect(self) -> Sequence[GaugeMetricFamily | CounterMetricFamily]:
        segments = self._members()
        totals = (
            ("master_total_capacity_bytes", "Bytes of all segments", sum(m.capacity for m in segments)),
            ("master_allocated_bytes", "Bytes that objects take", sum(m.used for m in segments)),
            ("master_key_count", "Objects, counting each replica", sum(m.objects for m in segments)),
            ("master_active_clients", "Segments that are alive", len(segments)),
        )
        families = [GaugeMetricFamily(name, text, value=value) for name, text, value in totals]
        for name, text, field in (
            ("segment_total_capacity_bytes", "Bytes of one segment", "capacity"),
            ("segment_allocated_bytes", "Bytes that objects take in it", "used"),
        ):
            family = GaugeMetricFamily(name, text, labels=["segment"])
            for m in segments:
                family.add_metric([m.name], getattr(m, field))
            families.append(family)
        return families


def _app(pages: Sequence[Callable[[Request], Response]], figures: Segments) -> Starlette:
    registry = CollectorRegistry()
    registry.register(figures)

    def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    def summary(request: Request) -> Response:
        return PlainTextResponse("".join(f"{m.name} {s.value:g}\n" for m in registry.collect() for s in m.samples[:1]))

    def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, MoonpoolError)
        return JSONResponse({"success": False, "error_code": code_of(error), "error_message": str(error)}, 503)

    routes = [Route(f"/{page.__name__}", page) for page in pages]
    routes += [Route("/metrics", metrics), Route("/metrics/summary", summary)]
    return Starlette(routes=routes, exception_handlers={MoonpoolError: refused})


def _lines(names: object) -> Response:
    return PlainTextResponse("".join(f"{name}\n" for name in names))  # type: ignore[attr-defined]


def _buffer(r: Replica) -> dict[str, object]:
    return {"size_": r.size, "buffer_address_": r.offset, "protocol_": "tcp", "transport_endpoint_": r.messenger}


def _found(replicas: Sequence[Replica]) -> dict[str, object]:
    if not replicas:
        return {"ok": False, "error": "OBJECT_NOT_FOUND"}
    disk = [{"transport_endpoint": r.messenger, "object_size": r.size} for r in replicas if r.tier == "disk"]
    answer: dict[str, object] = {"ok": True, "values": [_buffer(r) for r in replicas if r.tier == "memory"]}
    return answer | ({"local_disk_values": disk} if disk else {})
