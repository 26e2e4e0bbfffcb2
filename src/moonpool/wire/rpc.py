"""Request and reply. One interface, two ways: over a Unix socket, or straight into a service of the same process.

A *service* handles one request at a time per session. A session is one connection: when it ends, however it ends, the service
gives back all that the session held.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from moonpool.errors import (
    ConfigError,
    ConnectionLost,
    FrameTooLarge,
    MoonpoolError,
    PoolClosed,
    ProtocolError,
    WireError,
    from_fields,
)
from moonpool.wire import address, framing
from moonpool.wire.messages import Error, Message, Reply

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Message)

MAX_SESSIONS = 256
_PAUSE_S = 0.1
"""How long the acceptor rests when the process is out of descriptors or threads."""
_encode = msgspec.msgpack.Encoder().encode
_replies: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Reply)


class Service(ABC):
    """What a process offers. Called from many threads; each implementation locks its own state."""

    requests: Any
    """The union of message types that `handle` takes."""

    @abstractmethod
    def open_session(self) -> int: ...

    @abstractmethod
    def handle(self, session: int, request: Any) -> Message:
        """The reply. A MoonpoolError that is raised reaches the caller as itself."""

    @abstractmethod
    def close_session(self, session: int) -> None:
        """Give back what the session holds. Called exactly once for each session."""

    def descriptor(self, request: Any) -> int | None:
        """A file descriptor to send along with the reply to `request`; it stays the service's own."""
        return None


class Channel(ABC):
    """A client's end. Safe to use from several threads; calls go one after the other."""

    @abstractmethod
    def call(self, request: Message, reply: type[R]) -> R:
        """Send and wait. Raises what the service raised, ConnectionLost, DeadlineExceeded, ProtocolError."""

    @abstractmethod
    def take_descriptor(self) -> int:
        """The descriptor that came with the last reply; it is the caller's now."""

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

    def call(self, request: Message, reply: type[R]) -> R:
        if not self._open:
            raise PoolClosed("the pool is closed")
        self._last = request  # only `take_descriptor` looks, while nobody else has this channel yet
        return _checked(self._service.handle(self._session, request), reply)

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
    def __init__(self, path: str, timeout: float = 30.0) -> None:
        """Connect to the Unix socket at `path`. Raises ConnectionLost, ConfigError."""
        self._lock = threading.Lock()
        self._fds: list[int] = []
        self._socket = _connected(address.parse(path), timeout)

    def call(self, request: Message, reply: type[R]) -> R:
        with self._lock:
            try:
                framing.send(self._socket, _encode(request))
                body = framing.receive(self._socket, self._fds)
            except WireError:
                self._shut()  # a late reply would be taken for the next request's
                raise
            if body is None:
                self._shut()
                raise ConnectionLost("peer closed the connection")
        try:
            return _checked(_replies.decode(body), reply)
        except (msgspec.DecodeError, msgspec.ValidationError) as e:
            raise ProtocolError(f"unreadable reply: {e}") from e

    def take_descriptor(self) -> int:
        if not self._fds:
            raise ProtocolError("no descriptor came with the reply")
        return self._fds.pop()

    def _shut(self) -> None:
        self._socket.close()
        while self._fds:
            os.close(self._fds.pop())

    def close(self) -> None:
        _shutdown(self._socket)  # wakes a call that waits in another thread
        with self._lock:
            self._shut()


class Server:
    """Serves a `Service` on a Unix socket, one thread per connection, at most MAX_SESSIONS of them."""

    def __init__(self, path: str, service: Service) -> None:
        """Bind. The socket file is for this user only. Raises ConfigError if the path is taken by a living server."""
        self.path, self._service = address.parse(path), service
        self._decode: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(service.requests)
        self._threads: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._socket = _bind(self.path)
        self._acceptor = threading.Thread(target=self._accept, name=f"rpc-accept {Path(path).name}", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError as e:  # closed, or out of descriptors: then others must go before more can come
                if not self._closing.wait(_PAUSE_S):
                    log.warning("cannot accept: %s", e)
                continue
            if not self._start(connection):
                connection.close()

    def _start(self, connection: socket.socket) -> bool:
        """A thread for the connection; False if there are too many already."""
        with self._lock:
            if self._closing.is_set() or len(self._threads) >= MAX_SESSIONS:
                return False
            thread = threading.Thread(target=self._serve, args=(connection,), name="rpc-session", daemon=True)
            self._threads[thread] = connection
            try:
                thread.start()
            except RuntimeError as e:  # out of threads
                log.warning("cannot serve: %s", e)
                del self._threads[thread]
                return False
            return True

    def _serve(self, connection: socket.socket) -> None:
        session = self._service.open_session()
        try:
            self._converse(connection, session)
        except (ProtocolError, FrameTooLarge) as e:
            with contextlib.suppress(WireError):  # say why, then hang up: nothing that follows could be trusted
                framing.send(connection, _encode(error_message(e)))
            log.debug("session %d ended: %s", session, e)
        except WireError as e:
            log.debug("session %d ended: %s", session, e)
        finally:
            self._service.close_session(session)
            connection.close()
            with self._lock:
                self._threads.pop(threading.current_thread(), None)

    def _converse(self, connection: socket.socket, session: int) -> None:
        while (body := framing.receive(connection)) is not None:
            try:
                request = self._decode.decode(body)
            except (msgspec.DecodeError, msgspec.ValidationError) as e:
                raise ProtocolError(f"unreadable request: {e}") from e
            reply = _encode(self._answer(session, request))
            if len(reply) > framing.MAX_FRAME:
                reply = _encode(error_message(FrameTooLarge("reply over its cap", fix="Use smaller batches.")))
            framing.send(connection, reply, self._service.descriptor(request))

    def _answer(self, session: int, request: Any) -> Message:
        try:
            return self._service.handle(session, request)
        except MoonpoolError as e:
            return error_message(e)
        except Exception as e:  # process edge: a bug in one handler ends one request, not the server
            log.exception("request failed")
            return error_message(MoonpoolError(f"internal error: {e!r}"))

    def close(self) -> None:
        """Stop accepting, end all sessions, remove the socket file. Idempotent."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            open_ = dict(self._threads)
        _shutdown(self._socket)
        self._socket.close()
        self._acceptor.join()
        for connection in open_.values():
            _shutdown(connection)
        for thread in open_:
            thread.join(5)
        Path(self.path).unlink(missing_ok=True)


def _connected(path: str, timeout: float) -> socket.socket:
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as e:  # out of descriptors
        raise ConnectionLost(f"cannot open a socket: {e.strerror or e}", key=path) from e
    sock.settimeout(timeout)
    try:
        sock.connect(path)
    except OSError as e:
        sock.close()
        raise ConnectionLost(f"cannot connect: {e.strerror or e}", key=path) from e
    return sock


def _shutdown(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def error_message(e: MoonpoolError) -> Error:
    """An error as a reply, or as one result among others in a reply."""
    return Error(type(e).__name__, e.fields())


def _bind(path: str) -> socket.socket:
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        old = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(old)
        sock.listen(64)
    except OSError as e:
        sock.close()
        raise ConfigError(f"cannot listen: {e.strerror or e}", key=path, fix="Choose another socket path.") from e
    return sock


def _remove_stale(path: str) -> None:
    """A killed server leaves its socket file. Remove it, unless somebody answers there."""
    if not Path(path).is_socket():
        return
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(path)
    except OSError:
        Path(path).unlink(missing_ok=True)
    else:
        raise ConfigError("socket is in use", key=path, fix="Stop the other process or choose another socket path.")
    finally:
        probe.close()
