"""A socket for an HTTP server: loopback by default, in words that say what is wrong."""

from __future__ import annotations

import errno
import ipaddress
import socket

from moonpool.errors import ConfigError


def bind(host: str, port: int, *, api_key: str) -> socket.socket:
    """A listening TCP socket. Raises ConfigError: the port is in use, or the host is not loopback and there is no `api_key`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, OverflowError) as e:
        raise ConfigError(f"no such address: {e}", key=f"{host}:{port}") from e
    if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback and not api_key:
        fix = "Set an API key, or bind 127.0.0.1."
        raise ConfigError("other machines could reach this address and there is no API key", key=host, fix=fix)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as e:
        listener.close()
        why = f"port {port} is in use" if e.errno == errno.EADDRINUSE else f"cannot listen: {e.strerror}"
        raise ConfigError(why, key=f"{host}:{port}", fix="Choose another port, or 0 for any free one.") from e
    return listener
