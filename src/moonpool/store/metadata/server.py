"""Running the metadata server: in the foreground (`run_metadata`) or on a thread (`MetadataServer`)."""

from __future__ import annotations

import socket
import threading
from typing import Self

import uvicorn

from moonpool.errors import ConfigError
from moonpool.store.metadata.service import metadata_app
from moonpool.store.metadata.table import Table
from moonpool.wire.address import TcpAddress, is_loopback

_MAX_CONNECTIONS = 1024
_STOP_S = 5.0


def run_metadata(host: str = "127.0.0.1", port: int = 8080, *, trust_network: bool = False) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError: the port is taken, or the host is not loopback and not `trust_network`."""
    with listen(host, port, trust_network=trust_network) as listener:
        _uvicorn(Table()).run(sockets=[listener])


class MetadataServer:
    """The same on a thread. Port 0 takes a free one. Raises ConfigError as `run_metadata` does."""

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, table: Table | None = None, trust_network: bool = False
    ) -> None:
        self.table = table or Table()
        self._listener = listen(host, port, trust_network=trust_network)
        at, self.port = self._listener.getsockname()[:2]
        self.url = f"http://{TcpAddress(at, self.port)}/metadata"
        self._server = _uvicorn(self.table)
        self.thread = threading.Thread(target=self._run, name="moonpool-metadata", daemon=True)
        self.thread.start()

    @property
    def running(self) -> bool:
        return self.thread.is_alive()

    def _run(self) -> None:
        self._server.run(sockets=[self._listener])

    def close(self) -> None:
        """Idempotent."""
        self._server.should_exit = True
        self.thread.join(_STOP_S)
        self._server.force_exit = True
        self.thread.join(_STOP_S)
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def listen(host: str, port: int, *, trust_network: bool) -> socket.socket:
    """A listening socket. Raises ConfigError."""
    if not trust_network and not is_loopback(TcpAddress(host, port)):
        raise ConfigError(
            "the metadata protocol has no authentication, and other machines could reach this address",
            key=f"{host}:{port}",
            fix="Listen on 127.0.0.1, or say explicitly that the network is trusted (trust_network).",
        )
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, OverflowError, UnicodeError) as e:
        raise ConfigError(f"no such address: {e}", key=f"{host}:{port}") from e
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(1024)
    except OSError as e:
        sock.close()
        raise ConfigError(f"cannot listen: {e.strerror or e}", key=f"{host}:{port}", fix="Choose another port.") from e
    return sock


def _uvicorn(table: Table) -> uvicorn.Server:
    config = uvicorn.Config(
        metadata_app(table),
        loop="asyncio",
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)
