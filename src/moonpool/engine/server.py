"""Running the HTTP front: in the foreground (`serve`) or on a thread (`ServerThread`)."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import uvicorn
from prometheus_client.registry import Collector

from moonpool.engine.app import EngineApp
from moonpool.engine.instance import Instance
from moonpool.wire.http import bind

_GRACE_S = 5
"""Seconds that running answers get when the server stops."""

_MAX_CONNECTIONS = 1024
"""More connections at once are answered with 503."""


def serve(
    instances: Mapping[str, Instance],
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    api_key: str = "",
    collectors: Sequence[Collector] = (),
) -> None:
    """Serve until SIGINT or SIGTERM. The instances stay open; whoever made them closes them.

    Raises ConfigError: the port is in use, or the host is not loopback and there is no `api_key`.
    """
    with bind(host, port, api_key=api_key) as listener:
        _server(instances, api_key, collectors).run(sockets=[listener])


class ServerThread:
    """The same on a thread: `start`, `url`, `stop`. `port` 0 takes a free one. Raises ConfigError as `serve` does."""

    def __init__(
        self,
        instances: Mapping[str, Instance],
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        api_key: str = "",
        collectors: Sequence[Collector] = (),
    ) -> None:
        self._listener = bind(host, port, api_key=api_key)
        at, self.port = self._listener.getsockname()[:2]
        self.url = f"http://[{at}]:{self.port}" if ":" in at else f"http://{at}:{self.port}"
        self._server = _server(instances, api_key, collectors)
        self._thread = threading.Thread(target=self._run, name="moonpool-http", daemon=True)

    def _run(self) -> None:
        self._server.run(sockets=[self._listener])

    def start(self) -> Self:
        """Returns at once: the socket already listens, so clients that come early only wait a moment."""
        self._thread.start()
        return self

    def stop(self, timeout: float = 10.0) -> None:
        """Let running answers end for a few seconds, then cut them; leaves no thread. Twice is safe."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(timeout)
            self._server.force_exit = True
            self._thread.join(timeout)
        self._listener.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def _server(instances: Mapping[str, Instance], api_key: str, collectors: Sequence[Collector]) -> uvicorn.Server:
    app = EngineApp(instances, api_key=api_key, collectors=collectors)
    config = uvicorn.Config(
        app.asgi,
        loop="asyncio",
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_GRACE_S,
    )
    return uvicorn.Server(config)
