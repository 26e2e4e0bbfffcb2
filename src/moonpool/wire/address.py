"""Addresses of Moonpool's own processes: Unix sockets, written as a path or as `unix:PATH`."""

from __future__ import annotations

from moonpool.errors import ConfigError

_MAX_PATH = 107
"""Bytes; the kernel's `sun_path` holds 108 with its final zero."""


def parse(text: str) -> str:
    """The socket's path. Raises ConfigError for what can be none: empty, too long, or a network address."""
    path = text.removeprefix("unix:")
    if not path or "\0" in path:
        raise ConfigError("not a socket path", key=repr(text), fix="Give a path such as /run/moonpool/master.sock.")
    if "/" not in path and path.rpartition(":")[2].isdigit():
        raise ConfigError(
            "a network address, but master and messengers talk over Unix sockets only",
            key=text,
            fix="Give a path such as /run/moonpool/master.sock.",
        )
    size = len(path.encode())
    if size > _MAX_PATH:
        raise ConfigError(
            "socket path too long", key=path, need=f"<= {_MAX_PATH} bytes", have=str(size), fix="Use a shorter folder."
        )
    return path
