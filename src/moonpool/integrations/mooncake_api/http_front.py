"""An HTTP server on a thread of this process, on loopback unless its caller chose otherwise knowingly."""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading

import uvicorn
from starlette.applications import Starlette

from moonpool.errors import ConfigError

_GRACE_S = 2
_MAX_CONNECTIONS = 256


class HttpThread:
    """Serves from the moment that it is made. `purpose` stands in errors: who wanted the port.

    Raises ConfigError: the port is in use, or the host is not loopback: these pages know no secret.
    """

    def __init__(self, app: Starlette, host: str, port: int, purpose: str) -> None:
        self._listener = _bind(host, port, purpose)
        self.port: int = self._listener.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                loop="asyncio",
                log_level="warning",
                access_log=False,
                lifespan="off",
                limit_concurrency=_MAX_CONNECTIONS,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._thread = threading.Thread(target=self._run, name=f"moonpool-{purpose}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._server.run(sockets=[self._listener])

    def close(self) -> None:
        """Leaves no thread. Twice is safe."""
        self._server.should_exit = True
        self._thread.join(10)
        self._listener.close()


def _bind(host: str, port: int, purpose: str) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        raise ConfigError(f"no such address for {purpose}: {e}", key=f"{host}:{port}") from e
    if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        fix = "Bind 127.0.0.1 and put a proxy that asks for credentials before it."
        raise ConfigError(f"{purpose} would be open to other machines without a secret", key=f"{host}:{port}", fix=fix)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as e:
        listener.close()
        what = "the port is in use" if e.errno == errno.EADDRINUSE else str(e.strerror)
        raise ConfigError(f"cannot serve {purpose}: {what}", key=f"{host}:{port}", fix="Choose another port.") from e
    return listener
