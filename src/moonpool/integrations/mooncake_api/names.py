"""A store's name: `host:port`, unique in the pool, also the name of its segment."""

from __future__ import annotations

import os
import random
import socket

from moonpool.errors import ConfigError
from moonpool.wire import address as addresses

_ATTEMPTS = 20


def split(hostname: str) -> tuple[str, int | None]:
    """Host and port of `host`, `host:port` or `[v6]:port`. Raises ConfigError for what is none."""
    address = addresses.parse(hostname, default_port=0)
    if isinstance(address, addresses.UnixAddress):
        raise ConfigError("a path, where a host is wanted", key=hostname, fix="Give a host name or an IP address.")
    if addresses.is_wildcard(address):
        raise ConfigError(
            "a wildcard names no host", key=hostname, fix="Give the name under which others reach this host."
        )
    return address.host, address.port or None


def join(host: str, port: int) -> str:
    return str(addresses.TcpAddress(host, port))


def free_port() -> int:
    """A port of 12300 to 14300 (MC_STORE_CLIENT_MIN_PORT, MC_STORE_CLIENT_MAX_PORT) on which nobody listens just now.

    Raises ConfigError if 20 tries find none.
    """
    low, high = _limit("MC_STORE_CLIENT_MIN_PORT", 12300), _limit("MC_STORE_CLIENT_MAX_PORT", 14300)
    if low > high:
        raise ConfigError("MC_STORE_CLIENT_MIN_PORT is above MC_STORE_CLIENT_MAX_PORT", have=f"{low}, {high}")
    for port in random.sample(range(low, high + 1), min(_ATTEMPTS, high - low + 1)):
        if is_free(port):
            return port
    raise ConfigError("no free port found", need=f"one of {low} to {high}")


def _limit(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ConfigError("not a port", key=name, have=repr(text))
    return int(text)


def is_free(port: int) -> bool:
    """Nobody listens at this port of the loopback just now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
