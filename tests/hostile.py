"""What somebody hostile may send, for every socket that Moonpool opens.

Strategies make bytes; `send_and_hear` delivers them and returns all that the server says until it hangs up.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import msgspec
from hypothesis import strategies as st

from moonpool.wire import framing
from moonpool.wire.address import Address, UnixAddress
from moonpool.wire.messages import MasterRequest, MessengerRequest, Reply

MIB = 1 << 20


def frame(body: bytes, *, version: int = framing.VERSION, length: int | None = None) -> bytes:
    """One frame; `length`: what its header claims."""
    return framing.HEADER.pack(framing.MAGIC, version, len(body) if length is None else length) + body


def _names(union: object) -> list[str]:
    return [kind.__name__ for kind in getattr(union, "__args__", ())]


HANDSHAKE_NAMES = ["Open", "Proof", "Challenge", "Accepted"]
NAMES = HANDSHAKE_NAMES + _names(MasterRequest) + _names(MessengerRequest) + _names(Reply)

_leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40)
    | st.sampled_from([b"", bytes(32), "", "rpc", "data", "admin", "k" * 1025, 1 << 48, (1 << 48) + 1])
)
values = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
"""Anything that msgpack can say."""

messages = st.builds(
    lambda name, fields: msgspec.msgpack.encode([name, *fields]), st.sampled_from(NAMES), st.lists(values, max_size=5)
)
"""Names that are messages somewhere, with fields of any type."""

bombs = st.sampled_from(
    [
        b"\x91" * 2_000,  # deep arrays
        b"\x81" * 2_000,  # deep maps
        b"\x92\xa5Hello" + b"\x91" * 2_000,  # deep, where a field is skipped
        b"\x92\xa4Open" + b"\x91" * 400,
        b"\x92\xa5Exist" + b"\xdd\xff\xff\xff\xff" + b"\xa1a" * 100,  # an array that claims 4 G entries
        b"\x92\xa6Locate" + b"\xdd\xff\xff\xff\xff" + b"\xa1a" * 100,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x92\xa5Exist\x91\xdb\xff\xff\xff\xff",  # a string that claims 4 GiB
        b"\x92\xa5Exist\x91\xc6\xff\xff\xff\xff",
        b"\x92\xa5Exist\xc9\xff\xff\xff\xff\x01",  # an extension that does
        b"\x92\xa5Exist\x91\xa2\xff\xfe",  # no UTF-8
        b"\x92\xa2\xff\xfe\x90",
        b"\xc1",
        b"",
    ]
)

bodies = st.binary(max_size=200) | messages | bombs | values.map(msgspec.msgpack.encode)

frames = (
    bodies.map(frame)
    | st.builds(lambda body, version: frame(body, version=version), bodies, st.integers(0, 0xFFFF))
    | st.builds(lambda body, length: frame(body, length=length), bodies, st.integers(0, 0xFFFFFFFF))
    | st.builds(lambda body, cut: frame(body)[:cut], bodies, st.integers(0, 300))
)

streams = (
    st.binary(max_size=300)
    | st.lists(frames, min_size=1, max_size=4).map(b"".join)
    | st.sampled_from([b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\x00" * 9, struct.pack("<Q", 1 << 63)])
)
"""All that may come over a connection."""


def send_and_hear(address: Address, data: bytes) -> bytes:
    """Connect, send `data`, say that there is no more, and hear all that comes. TimeoutError if the server neither answers nor ends
    the connection for 10 s."""
    family = socket.AF_UNIX if isinstance(address, UnixAddress) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(10)
        sock.connect(address.path if isinstance(address, UnixAddress) else tuple(address))
        return converse(sock, data)


def converse(sock: socket.socket, data: bytes) -> bytes:
    """The same on a connection that is there. A reset is an end as well: the server has heard enough."""
    heard = b""
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while more := sock.recv(65536):
            heard += more
    except TimeoutError:
        raise
    except OSError:
        pass
    return heard


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
