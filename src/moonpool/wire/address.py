"""Addresses of Moonpool's own processes, as people write them.

unix:/run/m.sock   /run/m.sock   ./m.sock            a Unix socket (a bare path has a slash)
host:9000   tcp://host:9000   10.0.0.1:9000          TCP
[2001:db8::1]:9000                                   TCP over IPv6
host   2001:db8::1   [2001:db8::1]                   the same with the default port, where the caller has one
"""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import NamedTuple, TypeAlias

from moonpool.errors import ConfigError

_MAX_PATH = 107
"""Bytes; the kernel's `sun_path` holds 108 with its final zero."""
_MAX_HOST = 253
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_FIX = "Write host:port, [v6]:port, or a path such as /run/moonpool/master.sock."


class UnixAddress(NamedTuple):
    path: str

    def __str__(self) -> str:
        return self.path if "/" in self.path else f"unix:{self.path}"


class TcpAddress(NamedTuple):
    host: str
    """A name, or an IP address in its shortest form and without brackets."""
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}" if host == "unix" else f"{host}:{self.port}"


Address: TypeAlias = UnixAddress | TcpAddress


def parse(text: str, *, default_port: int | None = None) -> Address:
    """The address. Without `default_port` a TCP address must say its port; 0 stands for any free one (only to listen).

    Raises ConfigError for what is no address, saying which part is wrong. `parse(format(a)) == a`.
    """
    if not text.strip():
        raise ConfigError("an empty address", key=repr(text), fix=_FIX)
    if text != text.strip():
        raise ConfigError("spaces around the address", key=repr(text), fix="Remove them.")
    scheme, found, rest = text.partition("://")
    if found and scheme in ("unix", "tcp"):
        return _unix(rest) if scheme == "unix" else _tcp(rest, default_port)
    if found and "/" not in scheme:
        raise ConfigError(f"unknown scheme {scheme}://", key=text, need="tcp:// or unix:", fix=_FIX)
    if text.startswith("unix:"):
        return _unix(text.removeprefix("unix:"))
    return _unix(text) if "/" in text else _tcp(text, default_port)


def format(address: Address) -> str:
    return str(address)


def host_only(text: str) -> str:
    """A host where no port belongs (`--host`, an advertised name), normalised. Raises ConfigError."""
    address = parse(text, default_port=0)
    if isinstance(address, UnixAddress):
        raise ConfigError("a path, where a host is wanted", key=text, fix="Give a host name or an IP address.")
    if address.port or text.endswith(":0"):
        raise ConfigError(
            "a host with a port", key=text, fix=f"Write only {address.host}; the port has its own option."
        )
    return address.host


def advertised(address: Address, host: str = "") -> Address:
    """What others are told for a listener that is bound at `address`: `host`, if given, in place of the bound one.

    Raises ConfigError for a wildcard (0.0.0.0, ::), which is nowhere to connect to, and for an address whose port is not known yet.
    """
    if isinstance(address, UnixAddress):
        return address
    told = TcpAddress(host_only(host), address.port) if host else address
    if is_wildcard(told):
        raise ConfigError(
            "a wildcard is good to listen on, but nobody can connect to it",
            key=str(told),
            fix="Say under which host name or address others reach this machine (advertise).",
        )
    if told.port == 0:
        raise ConfigError("port 0 cannot be told to others", key=str(told), fix="Use the listener's own address.")
    return told


def is_wildcard(address: TcpAddress) -> bool:
    ip = _ip(address.host)
    return ip is not None and ip.is_unspecified


def is_loopback(address: TcpAddress) -> bool:
    """Whether only this machine can reach it. A name counts if all that it resolves to is loopback."""
    ip = _ip(address.host)
    if ip is not None:
        return ip.is_loopback
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    ips = [_ip(str(place[0])) for *_, place in found]
    return bool(ips) and all(ip is not None and ip.is_loopback for ip in ips)


def _unix(path: str) -> UnixAddress:
    if not path or "\0" in path or path.endswith("/"):
        raise ConfigError("not a socket path", key=repr(path), fix="Give a path such as /run/moonpool/master.sock.")
    size = len(path.encode(errors="surrogateescape"))
    if size > _MAX_PATH:
        raise ConfigError(
            "socket path too long", key=path, need=f"<= {_MAX_PATH} bytes", have=str(size), fix="Use a shorter folder."
        )
    return UnixAddress(path)


def _tcp(text: str, default_port: int | None) -> TcpAddress:
    if text.startswith("["):
        inside, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")) or ":" not in inside:
            raise ConfigError("not an IPv6 address in brackets", key=text, fix="Write [2001:db8::1]:9000.")
        return TcpAddress(_v6(inside, text), _port(rest[1:] if rest else None, text, default_port))
    if text.count(":") > 1:
        if "[" in text or "]" in text:
            raise ConfigError("brackets do not match", key=text, fix="Write [2001:db8::1]:9000.")
        return TcpAddress(_v6(text, text), _port(None, text, default_port))
    host, colon, port = text.partition(":")
    return TcpAddress(_name(host, text), _port(port if colon else None, text, default_port))


def _v6(host: str, text: str) -> str:
    try:
        return str(ipaddress.IPv6Address(host))
    except ValueError as e:
        raise ConfigError("not an IPv6 address", key=text, fix="Write [2001:db8::1]:9000.") from e


def _name(host: str, text: str) -> str:
    """A host name or an IPv4 address. Numbers and dots must be the latter: `1.2.3` would be read as 1.2.0.3 further down."""
    if not host:
        raise ConfigError("no host", key=text, fix="Write 127.0.0.1:port, or 0.0.0.0:port to listen everywhere.")
    if any(c.isspace() for c in host):
        raise ConfigError("spaces in the host", key=repr(text), fix="Remove them.")
    if re.fullmatch(r"[0-9.]+", host):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError as e:
            raise ConfigError("not an IPv4 address", key=text, fix="Write four numbers from 0 to 255.") from e
    if len(host) > _MAX_HOST or not all(_LABEL.fullmatch(label) for label in host.removesuffix(".").split(".")):
        raise ConfigError("not a host name", key=repr(text), fix=_FIX)
    return host


def _port(port: str | None, text: str, default: int | None) -> int:
    if port is None:
        if default is None:
            raise ConfigError("no port", key=text, fix="Write host:port, or [v6]:port for an IPv6 address.")
        return default
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ConfigError("not a port", key=text, need="0 to 65535", have=repr(port), fix=_FIX)
    return int(port)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    return (ip.ipv4_mapped or ip) if isinstance(ip, ipaddress.IPv6Address) else ip
