"""Data connections of clients on other machines. Each belongs to a session, and ends before the session's space is given away:
bytes that are still on their way must not land in another object."""

from __future__ import annotations

import secrets
import socket
import threading

from moonpool.errors import ProtocolError
from moonpool.transfer.server import TransferServer
from moonpool.wire.auth import Peer
from moonpool.wire.framing import hang_up

TOKEN_BYTES = 16
_TOKEN_S = 5.0
"""How long a new connection may take to say whose it is."""
_END_S = 30.0
"""A connection that was hung up ends in no time, unless the machine stands still."""


class DataConnections:
    def __init__(self, server: TransferServer) -> None:
        self._server = server
        self._open: dict[bytes, set[socket.socket]] = {}
        self._changed = threading.Condition()

    def new_session(self) -> bytes:
        """The token that names it."""
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._changed:
            self._open[token] = set()
        return token

    def serve(self, sock: socket.socket, peer: Peer) -> None:
        """Handler of purpose `data`. Raises ProtocolError for a token of no session."""
        sock.settimeout(_TOKEN_S)
        token = _token(sock)
        with self._changed:
            if token not in self._open:
                raise ProtocolError("a data connection of no session", key=peer.name)
            mine = self._open[token]
            mine.add(sock)
        try:
            self._server.serve(sock)
        finally:
            with self._changed:
                mine.discard(sock)
                self._changed.notify_all()

    def end_session(self, token: bytes) -> bool:
        """Cut its connections; returns when no byte can come over them any more (True), or after a long time (False)."""
        with self._changed:
            mine = self._open.pop(token, set())
            for sock in mine:
                hang_up(sock)
            return self._changed.wait_for(lambda: not mine, _END_S)

    def close(self) -> None:
        self._server.close()


def _token(sock: socket.socket) -> bytes:
    token = b""
    while len(token) < TOKEN_BYTES:
        try:
            more = sock.recv(TOKEN_BYTES - len(token))
        except OSError as e:
            raise ProtocolError(f"no token: {e}") from e
        if not more:
            raise ProtocolError("no token")
        token += more
    return token
