"""The default ports of everything that listens over TCP, in one place so that no two are the same. None is open unless asked for,
but the servers' own."""

from __future__ import annotations

from moonpool.errors import ConfigError
from moonpool.wire import address as addresses
from moonpool.wire.address import UnixAddress

MASTER = 7700
MESSENGER = 7701
MASTER_HTTP = 7780
MESSENGER_HTTP = 7781
METADATA = 8080
ENGINE = 8000
CONDUCTOR = 8100


def tcp(text: str, default_port: int) -> str:
    """`host`, or `host:port`, as the latter. Raises ConfigError for what is no TCP address."""
    address = addresses.parse(text, default_port=default_port)
    if isinstance(address, UnixAddress):
        raise ConfigError(
            "a path, where host:port is wanted", key=text, fix="Unix sockets have an option of their own."
        )
    return str(address)
