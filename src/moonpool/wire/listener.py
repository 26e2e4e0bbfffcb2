"""Listen for connections, authenticate them, hand each to the handler of its purpose. One thread per connection.

Strangers are bounded on their own: at most MAX_STRANGERS connections that have not proved themselves, each for at most
HANDSHAKE_S. When there are more, the oldest goes, so idle connections cannot lock the door.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from moonpool.errors import ConnectionLost, MoonpoolError
from moonpool.wire import address as addresses
from moonpool.wire import handshake, tls
from moonpool.wire.address import Address, TcpAddress
from moonpool.wire.auth import Peer, Security
from moonpool.wire.binding import bind, tune
from moonpool.wire.framing import hang_up

log = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[socket.socket, Peer], None]
"""Serves a connection until it ends, in a thread of its own. The listener closes the socket afterwards."""

MAX_CONNECTIONS = 256
MAX_STRANGERS = 64
HANDSHAKE_S = 10.0
_CROWDED_S = 0.2
"""How long a newcomer waits for a stranger to leave before the oldest one is shown out."""
_PAUSE_S = 0.1
"""How long the acceptor rests when the process is out of descriptors or threads."""
_END_S = 5.0
_QUIET_S = 10.0


class _Connection:
    __slots__ = ("deadline", "socket", "stranger", "thread")

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.thread: threading.Thread
        self.stranger = True
        self.deadline = time.monotonic() + HANDSHAKE_S


class Listener:
    def __init__(
        self,
        address: str | Address,
        security: Security,
        handlers: Mapping[str, Handler],
        *,
        name: str = "server",
        max_connections: int | None = None,
    ) -> None:
        """Bind and serve. `handlers` by purpose ("rpc", "data"); `name` stands in errors, logs and thread names.

        Raises ConfigError (see `binding.bind`; or TLS files that are no good).
        """
        address = addresses.parse(address) if isinstance(address, str) else address
        self.name, self._handlers, self._security = name, dict(handlers), security
        self._most = MAX_CONNECTIONS if max_connections is None else max_connections
        use_tls = security.tls is not None and isinstance(address, TcpAddress)
        self._tls = tls.server_context(security.tls) if use_tls and security.tls else None
        self.refused = 0
        """Connections that did not get past the handshake."""
        self._report_at = float("-inf")
        self._connections: set[_Connection] = set()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._bound = bind(address, security, name)
        self.address = self._bound.address
        """Where it listens, with the port that was got."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._acceptor = threading.Thread(target=self._accept_all, name=f"accept {name}", daemon=True)
        self._acceptor.start()

    @property
    def connections(self) -> int:
        """How many are authenticated now."""
        with self._changed:
            return sum(not c.stranger for c in self._connections)

    # -- the acceptor's thread

    def _accept_all(self) -> None:
        listening = self._bound.socket
        listening.setblocking(False)
        poll = select.poll()
        poll.register(listening, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        short = False
        while not self._closing.is_set():
            poll.poll(self._until_next_deadline())
            if self._closing.is_set():
                return
            try:
                sock, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                continue
            except OSError as e:  # out of descriptors or memory: others must go before more can come
                if not short:
                    log.warning("%s: cannot accept: %s", self.name, e)
                short = True
                self._closing.wait(_PAUSE_S)
                continue
            short = False
            self._start(sock)

    def _until_next_deadline(self) -> float | None:
        """Shows out strangers whose time is over; milliseconds until there may be another, None if there is none."""
        now = time.monotonic()
        with self._changed:
            strangers = [c for c in self._connections if c.stranger]
        for c in strangers:
            if c.deadline <= now:
                hang_up(c.socket)
        left = [c.deadline - now for c in strangers if c.deadline > now]
        return 1000 * min(left) + 1 if left else (1000.0 if strangers else None)

    def _start(self, sock: socket.socket) -> None:
        self._make_room()
        connection = _Connection(sock)
        connection.thread = threading.Thread(target=self._run, args=(connection,), name=self.name, daemon=True)
        with self._changed:
            self._connections.add(connection)
        try:
            connection.thread.start()
        except RuntimeError as e:  # out of threads
            log.warning("%s: cannot serve: %s", self.name, e)
            with self._changed:
                self._connections.discard(connection)
            sock.close()
            self._closing.wait(_PAUSE_S)

    def _make_room(self) -> None:
        def room() -> bool:
            return sum(c.stranger for c in self._connections) < MAX_STRANGERS or self._closing.is_set()

        with self._changed:
            while not self._changed.wait_for(room, _CROWDED_S):
                hang_up(min((c for c in self._connections if c.stranger), key=lambda c: c.deadline).socket)

    # -- a connection's thread

    def _run(self, connection: _Connection) -> None:
        try:
            self._serve(connection)
        except MoonpoolError as e:
            if connection.stranger:
                self._report_stranger(e)
            else:
                log.debug("%s: connection ended: %s", self.name, e)
        except Exception:  # process edge: a bug in one handler ends one connection, not the server
            log.exception("%s: connection failed", self.name)
        finally:
            connection.socket.close()
            with self._changed:
                self._connections.discard(connection)
                self._changed.notify_all()

    def _report_stranger(self, e: MoonpoolError) -> None:
        """A warning at most every _QUIET_S: strangers do not fill the log."""
        with self._changed:
            self.refused += 1
            count, now = self.refused, time.monotonic()
            due = now >= self._report_at
            if due:
                self._report_at = now + _QUIET_S
        log.log(logging.WARNING if due else logging.DEBUG, "%s: refused (%d so far): %s", self.name, count, e)

    def _serve(self, connection: _Connection) -> None:
        try:
            tune(connection.socket)
        except OSError as e:
            raise ConnectionLost(f"gone already: {e}") from e
        if self._tls:
            wrapped: ssl.SSLSocket = tls.accept(connection.socket, self._tls)
            connection.socket = wrapped
            tls.handshake(wrapped)
        purpose, peer = handshake.admit(
            connection.socket, self._security, self._handlers, lambda: self._let_in(connection)
        )
        log.debug("%s: %s from %s as %s", self.name, purpose, peer.name, peer.role)
        self._handlers[purpose](connection.socket, peer)

    def _let_in(self, connection: _Connection) -> None:
        with self._changed:
            have = sum(not c.stranger for c in self._connections)
            if self._closing.is_set() or have >= self._most:
                need = f"<= {self._most}"
                raise ConnectionLost("too many connections", key=str(self.address), need=need, have=str(have))
            connection.stranger = False
            self._changed.notify_all()

    def close(self) -> None:
        """Stop accepting, end all connections, wait for their handlers, free the address. Idempotent."""
        with self._changed:
            if self._closing.is_set():
                return
            self._closing.set()
            self._changed.notify_all()
        os.eventfd_write(self._wake, 1)
        self._acceptor.join()
        os.close(self._wake)
        with self._changed:
            left = set(self._connections)
        end = time.monotonic() + _END_S
        for connection in left:
            hang_up(connection.socket)
        for connection in left:
            connection.thread.join(max(0.0, end - time.monotonic()))
        self._bound.close()
