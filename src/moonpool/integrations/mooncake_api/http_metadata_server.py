"""The peer's `mooncake.http_metadata_server` on Moonpool's metadata server.

One difference, on purpose: it listens on loopback unless told otherwise (the peer: on all interfaces), since the protocol has no
authentication. `--trust-network` allows another host.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import threading
from enum import Enum
from typing import Any, Protocol

from starlette.responses import Response

from moonpool.errors import ConfigError
from moonpool.store.metadata.server import MetadataServer
from moonpool.store.metadata.service import answer, metadata_app
from moonpool.store.metadata.table import Table

log = logging.getLogger(__name__)


class KVPoll(Enum):
    """Status of the KV server."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


class Request(Protocol):
    """What is used of an aiohttp request, which the peer's callers pass."""

    method: str
    query: Any

    async def read(self) -> bytes: ...


class Reply(Response):
    """With the names that aiohttp's response has."""

    @property
    def status(self) -> int:
        return self.status_code

    @property
    def content_type(self) -> str | None:
        return self.media_type


class KVBootstrapServer:
    def __init__(self, port: int, host: str = "127.0.0.1", *, trust_network: bool = False) -> None:
        self.port, self.host = port, host
        self._trust_network = trust_network
        self._table = Table()
        self.app = metadata_app(self._table)
        self.store = self._table.values
        self.lock = asyncio.Lock()
        self._server: MetadataServer | None = None

    @property
    def thread(self) -> threading.Thread | None:
        return self._server.thread if self._server else None

    def run(self) -> threading.Thread:
        """Listen, on a thread; port 0 takes a free one. Raises ConfigError at once (the peer logs it, and serves nothing)."""
        self._server = MetadataServer(self.host, self.port, table=self._table, trust_network=self._trust_network)
        self.port = self._server.port
        log.info("HTTP Metadata Server started on %s:%s", self.host, self.port)
        return self._server.thread

    def close(self) -> None:
        if self._server:
            self._server.close()

    def poll(self) -> KVPoll:
        return KVPoll.Success if self._server and self._server.running else KVPoll.Failed

    async def _handle_metadata(self, request: Request) -> Reply:
        body = await request.read() if request.method == "PUT" else b""
        found = answer(self._table, request.method, request.query.get("key", ""), body)
        return Reply(bytes(found.body), found.status_code, media_type=found.media_type)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="HTTP metadata server for Mooncake's transfer engines")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (8080)")
    parser.add_argument("--host", default="127.0.0.1", help="host to bind to (127.0.0.1)")
    parser.add_argument("--trust-network", action="store_true", help="allow a host that other machines can reach")
    levels = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
    parser.add_argument("--log-level", choices=levels, default="INFO", help="logging level")
    return parser.parse_args()


def main() -> int:
    """The command `mooncake_http_metadata_server`."""
    args = parse_args()
    logging.basicConfig(level=args.log_level, format="%(asctime)s - %(name)s - %(levelname)s - %(message)s")
    server = KVBootstrapServer(args.port, args.host, trust_network=args.trust_network)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        server.run()
    except ConfigError as e:
        print(e, file=sys.stderr)
        return 2
    stopped.wait()
    server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
