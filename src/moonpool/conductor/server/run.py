"""Running the conductor's server: in the foreground, or on a thread for tests and one-process systems."""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from typing import Literal, Self

import uvicorn

from moonpool.conductor.config import ConductorConfig
from moonpool.conductor.server.app import ConductorApp
from moonpool.conductor.service import Conductor
from moonpool.wire.http import bind

_GRACE_S = 5


def serve(config: ConductorConfig, host: str, port: int, api_key: str = "") -> None:
    """Until SIGINT or SIGTERM. Raises ConfigError (the file, the port, another host than loopback without a key)."""
    app = ConductorApp(Conductor(config), api_key=api_key)
    with bind(host, port, api_key=api_key) as listener:
        _server(app, "auto").run(sockets=[listener])


class ConductorThread:
    """The same on a thread. `port` 0 takes a free one."""

    def __init__(self, config: ConductorConfig, host: str = "127.0.0.1", port: int = 0, api_key: str = "") -> None:
        self.conductor = Conductor(config)
        self._listener: socket.socket = bind(host, port, api_key=api_key)
        self.url = "http://{}:{}".format(*self._listener.getsockname()[:2])
        self._server = _server(ConductorApp(self.conductor, api_key=api_key))
        self._thread = threading.Thread(
            target=lambda: self._server.run(sockets=[self._listener]), name="moonpool-conductor", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._server.force_exit = True
        self._thread.join(10)
        self._listener.close()


def _server(app: ConductorApp, loop: Literal["auto", "asyncio"] = "asyncio") -> uvicorn.Server:
    """`auto` takes uvloop where it is installed; it leaves a pipe behind, which only a process of its own may."""
    config = uvicorn.Config(
        app,
        loop=loop,
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=_GRACE_S,
        backlog=4096,
    )
    return uvicorn.Server(config)
