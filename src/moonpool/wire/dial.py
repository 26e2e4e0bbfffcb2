"""Connect to a listener, and prove who we are."""

from __future__ import annotations

import contextlib
import socket
import time

from moonpool.errors import ConfigError, ConnectionLost, DeadlineExceeded, WireError
from moonpool.wire import address as addresses
from moonpool.wire import framing, handshake, tls
from moonpool.wire.address import Address, UnixAddress
from moonpool.wire.auth import Role, Security
from moonpool.wire.binding import tune

_HINT = "Is it overloaded, or does it want TLS?"


def connect(
    address: str | Address,
    security: Security = Security(),
    timeout: float = 30.0,
    *,
    purpose: str = "rpc",
    role: Role | None = None,
) -> socket.socket:
    """A connected, authenticated socket; `timeout` (seconds) is for all of it and stays the socket's timeout.

    `role`: None = the highest that `security` has a secret for. Raises ConnectionLost, DeadlineExceeded, AccessDenied, ProtocolError,
    ConfigError.
    """
    address = addresses.parse(address) if isinstance(address, str) else address
    deadline = time.monotonic() + timeout
    sock = _dial(address, deadline)
    try:
        if security.tls and not isinstance(address, UnixAddress):
            sock.settimeout(_left(deadline))
            sock = tls.connect(sock, security.tls, address.host)
        handshake.offer(sock, security, purpose, role, deadline)
        framing.set_timeout(sock, None, None)
        sock.settimeout(timeout)
    except BaseException as e:
        sock.close()
        if isinstance(e, WireError) and not e.key:
            hint = _HINT if isinstance(e, ConnectionLost) and not security.tls else ""
            raise type(e)(e.what, key=str(address), need=e.need, have=e.have, fix=e.fix or hint) from e
        raise
    return sock


def _dial(address: Address, deadline: float) -> socket.socket:
    if isinstance(address, UnixAddress):
        return _try(socket.AF_UNIX, address.path, address, deadline)
    if address.port == 0:
        raise ConfigError("port 0 is nowhere to connect to", key=str(address), fix="Give the port that the server got.")
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:
        raise ConnectionLost(f"cannot resolve the host: {e}", key=str(address)) from e
    for family, _, _, _, place in found[:-1]:
        with contextlib.suppress(ConnectionLost):
            return _try(family, place, address, deadline)
    family, _, _, _, place = found[-1]
    return _try(family, place, address, deadline)


def _try(family: int, place: object, address: Address, deadline: float) -> socket.socket:
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as e:  # out of descriptors
        raise ConnectionLost(f"cannot open a socket: {e.strerror or e}", key=str(address)) from e
    try:
        left = _left(deadline)
        framing.set_timeout(
            sock, left, left
        )  # the kernel's: it waits for room in a Unix socket's backlog, Python's does not
        sock.connect(place)  # type: ignore[arg-type]
        tune(sock)
        if family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError("the port is free, and the connection was made to itself")
    except (TimeoutError, BlockingIOError) as e:
        sock.close()
        raise DeadlineExceeded("no connection in time", key=str(address)) from e
    except OSError as e:
        sock.close()
        raise ConnectionLost(f"cannot connect: {e.strerror or e}", key=str(address)) from e
    except BaseException:
        sock.close()
        raise
    return sock


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("no connection in time")
    return left
