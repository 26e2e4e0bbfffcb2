"""ASGI without a framework, for the proxied routes: read a body, watch for the client to leave, send bytes on as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeAlias

import msgspec

from moonpool.errors import RequestError

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]

MAX_BODY = 32 << 20
"""A million tokens as JSON numbers are about 8 MB."""


class Gone(Exception):
    """The client went away."""


class Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.path: str = scope["path"]
        self.headers: dict[str, str] = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        self._receive, self._send = receive, send
        self.begun = False
        """Whether the status line is out: after that nothing can be tried again."""

    async def body(self) -> bytes:
        """Raises RequestError (too large), Gone."""
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Gone
            piece = message.get("body", b"")
            size += len(piece)
            if size > MAX_BODY:
                raise RequestError("body too large", need=f"<= {MAX_BODY} B")
            parts.append(piece)
            more = message.get("more_body", False)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def gone(self) -> None:
        """Returns when the client has left."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: Headers) -> None:
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def piece(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def json(self, status: int, content: object, headers: Headers | None = None) -> None:
        raw = msgspec.json.encode(content)
        plain = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
        await self.start(status, [*plain, *(headers or [])])
        await self.end(raw)


async def unless_gone(exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` in this task to its end, or cancels it as soon as the client leaves (raises Gone)."""
    task = asyncio.current_task()
    assert task is not None
    left = False

    def leave(watch: asyncio.Task[None]) -> None:
        nonlocal left
        if not watch.cancelled():
            left = True
            task.cancel()

    watch = asyncio.create_task(exchange.gone())
    watch.add_done_callback(leave)
    try:
        await work
    except asyncio.CancelledError:
        if left and not task.uncancel():
            raise Gone from None
        raise
    finally:
        watch.remove_done_callback(leave)
        watch.cancel()


def error_body(
    message: str, kind: str = "invalid_request_error", code: str | None = None, param: str | None = None
) -> Any:
    """OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
