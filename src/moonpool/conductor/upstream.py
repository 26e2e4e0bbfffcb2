"""HTTP to the instances: one pooled client, answers as streams of bytes that nobody looks into."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from moonpool.conductor.registry import InstanceEntry
from moonpool.errors import ConnectionLost

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade host content-length".split()
)
"""Headers that belong to one connection (RFC 9110, 7.6.1), and those that the next client makes itself."""
_CHUNK = 1 << 16


class UpstreamError(ConnectionLost):
    """An instance did not answer as it should: connection refused or lost, 5xx before the first byte, or a time-out."""

    def __init__(self, what: str, *, key: str, status: int = 0) -> None:
        super().__init__(what, key=key)
        self.status = status


class Timeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds; 0 = none. A long prefill is no fault: the first byte may take its time."""

    connect_s: float = 3.0
    first_byte_s: float = 600.0
    idle_s: float = 120.0
    """Between two pieces of an answer that has begun."""


class Answer:
    """Status and headers of an answer that has begun; its body comes in pieces."""

    def __init__(
        self, status: int, headers: list[tuple[bytes, bytes]], response: aiohttp.ClientResponse, idle: float
    ) -> None:
        self.status, self.headers = status, headers
        self._response, self._idle = response, idle

    @property
    def streamed(self) -> bool:
        """Server-sent events: each piece goes on as it comes."""
        return self._response.content_type == "text/event-stream"

    async def pieces(self) -> AsyncIterator[bytes]:
        """Raises UpstreamError if the instance goes away or falls silent."""
        try:
            while True:
                async with asyncio.timeout(self._idle or None):
                    piece = await self._response.content.readany()
                if not piece:
                    return
                yield piece
        except (aiohttp.ClientError, OSError) as e:
            raise UpstreamError(f"the answer broke off: {e}", key=str(self._response.url)) from e
        except TimeoutError as e:
            raise UpstreamError("the answer fell silent", key=str(self._response.url)) from e

    async def whole(self) -> bytes:
        return b"".join([p async for p in self.pieces()])


class Upstream:
    """Made inside a running loop; closed with `close` or as a context manager."""

    def __init__(self, timeouts: Timeouts = Timeouts(), *, limit: int = 0) -> None:
        """`limit`: connections at once, 0 = no limit."""
        self._t = timeouts
        connector = aiohttp.TCPConnector(limit=limit, keepalive_timeout=30, force_close=False)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s or None),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    @asynccontextmanager
    async def post(
        self, instance: InstanceEntry, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[Answer]:
        """The answer once its headers are there. Leaving the block ends the request upstream, whatever was read. Raises
        UpstreamError; any status below 500 is an answer."""
        url = f"{instance.url.rstrip('/')}{path}"
        try:
            async with asyncio.timeout(self._t.first_byte_s or None):
                response = await self._session.post(url, data=body, headers=headers)
        except (aiohttp.ClientError, OSError) as e:
            raise UpstreamError(f"no connection: {e}", key=instance.name) from e
        except TimeoutError as e:
            raise UpstreamError(f"no answer in {self._t.first_byte_s:g} s", key=instance.name) from e
        try:
            if response.status >= 500:
                said = (await response.content.read(300)).decode("utf-8", "replace")
                raise UpstreamError(f"answered {response.status}: {said}", key=instance.name, status=response.status)
            yield Answer(response.status, _passed(response.raw_headers), response, self._t.idle_s)
        finally:
            if not response.closed:
                response.close() if not response.content.at_eof() else response.release()

    async def get(self, url: str, timeout: float) -> tuple[int, bytes]:
        """A small answer, whole. Raises UpstreamError."""
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=timeout)) as response:
                return response.status, await response.content.read(_CHUNK)
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            raise UpstreamError(f"no answer: {type(e).__name__} {e}".rstrip(), key=url) from e

    async def close(self) -> None:
        await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


def _passed(headers: tuple[tuple[bytes, bytes], ...]) -> list[tuple[bytes, bytes]]:
    """An answer's length goes on, too: its bytes are not touched, and who gets fewer knows it."""
    kept = HOP_BY_HOP - {b"content-length"}
    return [(k.lower(), v) for k, v in headers if k.lower() not in kept]
