"""Sockets to listen on: nobody's place is taken, and what is in the way is named."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

from moonpool.errors import ConfigError
from moonpool.wire.address import Address, TcpAddress, UnixAddress, is_loopback
from moonpool.wire.auth import Security
from moonpool.wire.owner import owner_of

_BACKLOG = 1024
_DEAD_AFTER_S = 10
"""A host that does not answer for so long is taken for dead."""


class Bound:
    """A listening socket, and the right to its place."""

    def __init__(self, sock: socket.socket, address: Address, lock: int | None) -> None:
        self.socket, self.address, self._lock = sock, address, lock

    def close(self) -> None:
        """Gives the place back. Idempotent."""
        self.socket.close()
        if isinstance(self.address, UnixAddress) and self._lock is not None:
            Path(self.address.path).unlink(missing_ok=True)
            _unlock(self.address.path, self._lock)
            self._lock = None


def bind(address: Address, security: Security, purpose: str) -> Bound:
    """Listen at `address`. `purpose` stands in errors: who wanted the port.

    Raises ConfigError: in use, not ours, or open to other machines without a secret.
    """
    return _bind_unix(address, purpose) if isinstance(address, UnixAddress) else _bind_tcp(address, security, purpose)


def tune(sock: socket.socket) -> None:
    """Small messages leave at once, and a dead host ends the connection."""
    if sock.family == socket.AF_UNIX:
        return
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_AFTER_S * 1000),
    ):
        sock.setsockopt(level, option, value)


def _bind_tcp(address: TcpAddress, security: Security, purpose: str) -> Bound:
    sock: socket.socket | None = None
    try:
        family, kind, proto, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if security.secret is None and not is_loopback(TcpAddress(str(place[0]), address.port)):
            raise ConfigError(
                f"the {purpose} would be open to other machines without a secret",
                key=str(address),
                fix="Give a secret file (MOONPOOL_SECRET_FILE), or listen on 127.0.0.1.",
            )
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections' TIME_WAIT, not living listeners
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address.host != "::"))
        sock.bind(place)
        sock.listen(_BACKLOG)
    except OSError as e:
        if sock is not None:
            sock.close()
        owner = owner_of(address.port) if e.errno == errno.EADDRINUSE else ""
        raise _cannot_listen(e, str(address), f"{purpose} port {address.port}", owner) from e
    return Bound(sock, TcpAddress(address.host, sock.getsockname()[1]), None)


def _bind_unix(address: UnixAddress, purpose: str) -> Bound:
    path = Path(address.path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    lock: int | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(address.path)
        _remove_stale(path)
        _bind_private(sock, address.path)
        sock.listen(_BACKLOG)
    except (OSError, ConfigError) as e:
        sock.close()
        if lock is not None:
            _unlock(address.path, lock)
        if isinstance(e, ConfigError):
            raise
        raise _cannot_listen(e, address.path, f"{purpose} socket") from e
    return Bound(sock, address, lock)


def _bind_private(sock: socket.socket, path: str) -> None:
    """The file is for this user from its first moment: the mode of the socket itself becomes the file's, whatever the umask,
    which belongs to the whole process and its other threads."""
    os.fchmod(sock.fileno(), 0o600)
    sock.bind(path)


def _cannot_listen(e: OSError, key: str, what: str, owner: str = "") -> ConfigError:
    fix = "Stop who has it, or choose another address."
    return ConfigError(f"the {what} cannot be had: {e.strerror or e}", key=key, have=owner, fix=fix)


def _lock(path: str) -> int:
    """Hold `path`.lock, so that of two that start only one looks for a dead one's socket. The kernel frees it with the process."""
    while True:
        fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if Path(f"{path}.lock").stat().st_ino == os.fstat(fd).st_ino:
                return fd
        except FileNotFoundError:
            pass  # its last owner has just removed it
        except BlockingIOError as e:
            os.close(fd)
            raise _in_use(path) from e
        os.close(fd)


def _unlock(path: str, fd: int) -> None:
    Path(f"{path}.lock").unlink(missing_ok=True)
    os.close(fd)


def _remove_stale(path: Path) -> None:
    """A killed server leaves its socket file. Remove it, unless somebody answers there."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog is an answer too
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            try:
                probe.connect(str(path))
            except BlockingIOError:
                pass
            raise _in_use(str(path))
    path.unlink(missing_ok=True)


def _in_use(path: str) -> ConfigError:
    return ConfigError("socket is in use", key=path, fix="Stop the other process or choose another socket path.")
