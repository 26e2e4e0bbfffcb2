"""Health and metrics of one process over HTTP, on a thread of it.

    GET /healthz    200: the process answers
    GET /readyz     200, or 503 and why not: whether to send work here
    GET /metrics    Prometheus text

Nothing here can change anything, and nothing here is secret; but nobody is asked who they are either. So it listens on loopback,
unless the pool has a secret: then its owner has thought about who reaches the machine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Self

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from moonpool.wire import address as addresses
from moonpool.wire import binding
from moonpool.wire.auth import Security

log = logging.getLogger(__name__)

_CONNECTIONS = 64
_GRACE_S = 1
_END_S = 5.0


def health_app(not_ready: Callable[[], str], collectors: Iterable[Collector]) -> Starlette:
    """`not_ready` says why, empty if it is ready."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def readyz(_: Request) -> Response:
        why = await run_in_threadpool(not_ready)
        return PlainTextResponse(f"not ready: {why}\n" if why else "ready\n", 503 if why else 200)

    async def metrics(_: Request) -> Response:
        text = await run_in_threadpool(generate_latest, registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    routes = {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics}
    return Starlette(routes=[Route(path, endpoint, methods=["GET"]) for path, endpoint in routes.items()])


class HealthServer:
    """Serves from construction to `close`. Raises ConfigError: the metrics port is taken, or open to others without a secret."""

    def __init__(self, app: Starlette, address: str, security: Security, owner: str) -> None:
        """`address`: `host:port`, port 0 for any; `owner` stands in errors: whose metrics port it is."""
        self._bound = binding.bind(addresses.parse(address), security, f"{owner} metrics")
        self.url = f"http://{self._bound.address}"
        config = uvicorn.Config(
            app,
            loop="asyncio",
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            log_config=None,
            limit_concurrency=_CONNECTIONS,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="moonpool-metrics", daemon=True)
        self._thread.start()
        log.info("%s metrics at %s/metrics", owner, self.url)

    def _run(self) -> None:
        self._server.run(sockets=[self._bound.socket])

    def close(self) -> None:
        """Idempotent."""
        self._server.should_exit = True
        self._thread.join(_END_S)
        self._server.force_exit = True
        self._thread.join(_END_S)
        self._bound.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
