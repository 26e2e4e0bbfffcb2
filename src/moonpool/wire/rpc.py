"""Request and reply. One interface, two ways: over a socket, or straight into a service of the same process.

A *service* handles one request at a time per session. A session is one connection: when it ends, however it ends, the service
gives back all that the session held.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from moonpool.errors import (
    AccessDenied,
    ConnectionLost,
    DeadlineExceeded,
    FrameTooLarge,
    MoonpoolError,
    PoolClosed,
    ProtocolError,
    WireError,
    from_fields,
)
from moonpool.wire.address import Address, TcpAddress, UnixAddress
from moonpool.wire.auth import THIS_PROCESS, Peer, Role, Security
from moonpool.wire.dial import connect
from moonpool.wire.framing import hang_up
from moonpool.wire.handshake import decoded
from moonpool.wire.listener import Handler, Listener
from moonpool.wire.messages import Error, Message, Reply
from moonpool.wire.stream import Stream

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Message)

_MOST_OWED = 32
"""Answers that are left in the socket's buffer: far fewer bytes than it holds, so that the server never waits for us."""
_SEND_S = 30.0
"""How long a reply waits for a client that does not read."""
_replies: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Reply)


class Service(ABC):
    """What a process offers. Called from many threads; each implementation locks its own state."""

    requests: Any
    """The union of message types that `handle` takes."""

    @abstractmethod
    def open_session(self) -> int: ...

    def identify(self, session: int, peer: Peer) -> None:  # noqa: B027 - most services do not care
        """Who has opened the session; called once, before its first request."""

    @abstractmethod
    def handle(self, session: int, request: Any) -> Message:
        """The reply. A MoonpoolError that is raised reaches the caller as itself."""

    @abstractmethod
    def close_session(self, session: int) -> None:
        """Give back what the session holds. Called exactly once for each session."""

    def descriptor(self, request: Any) -> int | None:
        """A file descriptor to send along with the reply to `request`, over Unix sockets; it stays the service's own."""
        return None


class Channel(ABC):
    """A client's end. Safe to use from several threads; calls go one after the other."""

    @abstractmethod
    def call(self, request: Message, reply: type[R], *, timeout: float | None = None) -> R:
        """Send and wait, for at most `timeout` seconds (None = the channel's own).

        Raises what the service raised, ConnectionLost, DeadlineExceeded, ProtocolError.
        """

    @abstractmethod
    def post(self, request: Message) -> None:
        """Send, and do not wait: for what nobody needs an answer to. Later calls are served after it. Raises ConnectionLost,
        DeadlineExceeded, PoolClosed."""

    @abstractmethod
    def take_descriptor(self) -> int:
        """The descriptor that came with the last reply; it is the caller's now."""

    def keeper(self) -> socket.socket | None:
        """What keeps the session open, until it is closed too, when an error has closed the channel. `close` ends the session all
        the same."""
        return None

    @abstractmethod
    def close(self) -> None: ...


def _checked(reply: Any, kind: type[R]) -> R:
    if isinstance(reply, Error):
        raise from_fields(reply.name, reply.fields)
    if not isinstance(reply, kind):
        raise ProtocolError("unexpected reply", need=kind.__name__, have=type(reply).__name__)
    return reply


class LocalChannel(Channel):
    """Straight into a service of this process: same handlers, no bytes."""

    def __init__(self, service: Service) -> None:
        self._service, self._session, self._open = service, service.open_session(), True
        self._lock = threading.Lock()
        service.identify(self._session, THIS_PROCESS)

    def call(self, request: Message, reply: type[R], *, timeout: float | None = None) -> R:
        if not self._open:
            raise PoolClosed("the pool is closed")
        self._last = request  # only `take_descriptor` looks, while nobody else has this channel yet
        return _checked(self._service.handle(self._session, request), reply)

    def post(self, request: Message) -> None:
        if not self._open:
            raise PoolClosed("the pool is closed")
        self._service.handle(self._session, request)

    def take_descriptor(self) -> int:
        fd = self._service.descriptor(self._last)
        assert fd is not None
        return os.dup(fd)

    def close(self) -> None:
        with self._lock:
            was, self._open = self._open, False
        if was:
            self._service.close_session(self._session)


class SocketChannel(Channel):
    def __init__(
        self,
        address: str | Address,
        timeout: float = 30.0,
        *,
        security: Security = Security(),
        role: Role | None = None,
    ) -> None:
        """Connect. `timeout` (seconds) is for this and for each call. Raises as `dial.connect`."""
        self._lock = threading.Lock()
        self._timeout = timeout
        self._owed = 0
        """Answers to what was posted that were not read yet."""
        sock = connect(address, security, timeout, role=role)
        unix = sock.family == socket.AF_UNIX
        self._stream = Stream(sock, receive_s=timeout, send_s=timeout, descriptors=unix)

    def call(self, request: Message, reply: type[R], *, timeout: float | None = None) -> R:
        limit = self._timeout if timeout is None else timeout
        if not self._lock.acquire(blocking=False):
            limit = self._wait_for_turn(limit)
        stream = self._stream
        try:
            packed = stream.pack(request)
            try:
                stream.set_timeout(limit)
                stream.send(packed)
                self._take_owed(0)
                body = stream.receive()
                if body is None:
                    raise ConnectionLost("peer closed the connection")
                if stream.more:
                    raise ProtocolError("more than one reply to one request")
            except WireError:
                stream.close()  # a late reply would be taken for the next request's
                raise
        finally:
            self._lock.release()
        return _checked(decoded(_replies, body), reply)

    def post(self, request: Message) -> None:
        limit = self._timeout
        if not self._lock.acquire(blocking=False):
            limit = self._wait_for_turn(limit)
        stream = self._stream
        try:
            packed = stream.pack(request)
            try:
                stream.set_timeout(limit)
                self._take_owed(_MOST_OWED)
                stream.send(packed)
                self._owed += 1
            except WireError:
                stream.close()
                raise
        finally:
            self._lock.release()

    def _take_owed(self, most: int) -> None:
        """Read the answers that nobody waits for, until at most `most` are left."""
        while self._owed > most:
            if self._stream.receive() is None:
                raise ConnectionLost("peer closed the connection")
            self._owed -= 1

    def _wait_for_turn(self, limit: float) -> float:
        """Take the lock; the time that is left."""
        start = time.monotonic()
        if not self._lock.acquire(timeout=min(limit, threading.TIMEOUT_MAX)):
            raise DeadlineExceeded("another call on this channel takes too long")
        return max(0.001, limit - (time.monotonic() - start))

    def take_descriptor(self) -> int:
        if not self._stream.fds:
            raise ProtocolError("no descriptor came with the reply")
        return self._stream.fds.pop()

    def keeper(self) -> socket.socket:
        try:
            return self._stream.socket.dup()
        except OSError as e:
            raise ConnectionLost(f"no descriptor left: {e.strerror}") from e

    def close(self) -> None:
        hang_up(self._stream.socket)  # wakes a call that waits in another thread
        with self._lock:
            self._stream.close()


class Server:
    """Serves a `Service` at one or more addresses."""

    def __init__(
        self,
        address: str | Address | Sequence[str | Address],
        service: Service,
        *,
        security: Security = Security(),
        handlers: Mapping[str, Handler] | None = None,
        name: str = "server",
        max_connections: int | None = None,
    ) -> None:
        """Bind all. `handlers`: of further purposes, by their names (`data`). A Unix socket's file is for this user only.

        Raises ConfigError: an address is taken, or open to other machines without a secret.
        """
        places = [address] if isinstance(address, str | UnixAddress | TcpAddress) else list(address)
        all_handlers = {"rpc": serve(service), **(handlers or {})}
        self.listeners: list[Listener] = []
        try:
            for place in places:
                self.listeners.append(
                    Listener(place, security, all_handlers, name=name, max_connections=max_connections)
                )
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> list[Address]:
        """Where it listens, in the order given, with the ports that were got."""
        return [listener.address for listener in self.listeners]

    @property
    def path(self) -> str:
        """The first Unix socket's path."""
        return next(a.path for a in self.addresses if isinstance(a, UnixAddress))

    def close(self) -> None:
        """Stop accepting, end all sessions, free the addresses. Idempotent."""
        for listener in self.listeners:
            listener.close()


def serve(service: Service) -> Handler:
    """The handler of purpose `rpc`: one session per connection."""
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(service.requests)

    def handler(sock: socket.socket, peer: Peer) -> None:
        stream = Stream(sock, receive_s=None, send_s=_SEND_S)
        session = service.open_session()
        try:
            service.identify(session, peer)
            _converse(stream, decoder, service, session, peer.local)
        except (
            ProtocolError,
            FrameTooLarge,
            AccessDenied,
        ) as e:  # say why, then hang up: nothing that follows could be trusted
            stream.send(stream.pack(error_message(e)))
            raise
        finally:
            service.close_session(session)
            stream.close()

    return handler


def _converse(
    stream: Stream, decoder: msgspec.msgpack.Decoder[Any], service: Service, session: int, descriptors: bool
) -> None:
    while (body := stream.receive()) is not None:
        request = decoded(decoder, body)
        reply = _answer(service, session, request)
        try:
            packed = stream.pack(reply)
        except FrameTooLarge:
            packed = stream.pack(error_message(FrameTooLarge("reply over its cap", fix="Use smaller batches.")))
        stream.send(packed, service.descriptor(request) if descriptors else None)


def _answer(service: Service, session: int, request: Any) -> Message:
    try:
        return service.handle(session, request)
    except MoonpoolError as e:
        return error_message(e)
    except Exception as e:  # process edge: a bug in one handler ends one request, not the server
        log.exception("request failed")
        return error_message(MoonpoolError(f"internal error: {e!r}"))


def error_message(e: MoonpoolError) -> Error:
    """An error as a reply, or as one result among others in a reply."""
    return Error(type(e).__name__, e.fields())
