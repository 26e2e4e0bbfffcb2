"""The HTTP side of the peer's master (its `metrics_port`): figures, segments and the list of keys."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from moonpool.errors import ConnectionLost
from moonpool.store.mooncake.config import host_and_port

_MAX_REPLY = 64 << 20
"""Bytes; the list of keys, which is read line by line, has no bound."""


class PeerSegment(msgspec.Struct, frozen=True):
    """One entry of `/get_segments_detail`, the part of it that is used."""

    segment_name: str
    te_endpoint: str
    """`host:port` of its transfer engine, by which replica descriptors name it."""
    base_address: str
    """Hexadecimal."""
    size_bytes: int
    allocator_used_bytes: int
    status: str

    @property
    def base(self) -> int:
        return int(self.base_address, 16)


class _Segments(msgspec.Struct, frozen=True):
    segments: list[PeerSegment]


class Admin:
    """Raises ConnectionLost from every method if the master does not answer as it should."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._host, self._port = host_and_port(address, "admin_address")

    def figures(self) -> dict[str, int]:
        """The unlabelled series of `/metrics`."""
        lines = self._text("/metrics").splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and line[0] != "#" and "{" not in line)
        return {pair[0]: int(float(pair[1])) for pair in pairs if len(pair) == 2}

    def segments(self) -> list[PeerSegment]:
        try:
            return msgspec.json.decode(self._text("/get_segments_detail"), type=_Segments).segments
        except msgspec.MsgspecError as e:
            raise self._lost(f"not what is expected: {e}") from e

    def all_keys(self) -> Iterator[str]:
        """All keys, in no order. One with a line break in it comes in pieces: the peer's list cannot tell."""
        with self._get("/get_all_keys") as reply:
            for line in reply:
                if key := line.decode(errors="replace").rstrip("\n"):
                    yield key

    def _text(self, path: str) -> str:
        with self._get(path) as reply:
            return reply.read(_MAX_REPLY).decode(errors="replace")

    @contextmanager
    def _get(self, path: str) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            if reply.status != http.client.OK:
                raise self._lost(f"{path}: status {reply.status}")
            yield reply
        except (OSError, http.client.HTTPException) as e:
            raise self._lost(f"{path}: {e}") from e
        finally:
            connection.close()

    def _lost(self, have: str) -> ConnectionLost:
        return ConnectionLost("the master's admin port does not answer", key=self._address, have=have)
