"""The table over HTTP, exactly as Mooncake's TransferEngine asks for it.

    GET    /metadata?key=K    200 the value | 404
    PUT    /metadata?key=K    200 | 400 another process has this `rpc_meta` key | 413 value too large | 507 the table is full
    DELETE /metadata?key=K    200 | 404
    DELETE /owners?name=N     200 how many keys a dead `host:port` left (ours; the peer's has no such call)
    GET    /health            200

A blank key is 400, any other method 405. **The protocol knows no authentication**: who reaches the port can point transfers at any
address. So it listens on loopback unless it is told, explicitly, that its network is to be trusted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from moonpool.store.metadata.table import Outcome, Table

_PUT_STATUS = {Outcome.DONE: 200, Outcome.TAKEN: 400, Outcome.TOO_LARGE: 413, Outcome.FULL: 507}
_PUT_TEXT = {
    Outcome.DONE: "metadata updated",
    Outcome.TAKEN: "Duplicate rpc_meta key not allowed",
    Outcome.TOO_LARGE: "key or value too large",
    Outcome.FULL: "the metadata server is full",
}


def metadata_app(table: Table) -> Starlette:
    """Runs on one event loop, which is what serialises access to `table`."""

    async def metadata(request: Request) -> Response:
        try:
            body = await bounded(request.stream(), table.max_value) if request.method == "PUT" else b""
        except ClientDisconnect:
            return reply("the client went away", 400)
        return answer(table, request.method, request.query_params.get("key", ""), body)

    async def owners(request: Request) -> Response:
        name = request.query_params.get("name", "").strip()
        return reply(str(table.remove_owner(name)), 200) if name else reply("owner name is required", 400)

    async def health(_: Request) -> Response:
        return PlainTextResponse("OK")

    return Starlette(
        routes=[
            Route("/metadata", _AnyMethod(metadata)),
            Route("/owners", owners, methods=["DELETE"]),
            Route("/health", health, methods=["GET"]),
        ]
    )


class _AnyMethod:
    """An ASGI endpoint: starlette lets it have every method (a function gets only GET), so that 400 comes before 405."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        response = await self._handler(Request(scope, receive))
        await response(scope, receive, send)


async def bounded(stream: AsyncIterator[bytes], most: int) -> bytes:
    """The body, or its first `most` + 1 bytes and more of the last chunk: enough to see that it is too large."""
    body = bytearray()
    async for chunk in stream:
        body += chunk
        if len(body) > most:
            break
    return bytes(body)


def answer(table: Table, method: str, key: str, body: bytes) -> Response:
    key = key.strip()
    if not key:
        return reply("metadata key is required", 400)
    match method:
        case "GET":
            value = table.get(key)
            return reply("metadata not found", 404) if value is None else reply(value, 200)
        case "PUT":
            outcome = table.put(key, body)
            return reply(_PUT_TEXT[outcome], _PUT_STATUS[outcome])
        case "DELETE":
            return reply("metadata deleted", 200) if table.remove(key) else reply("metadata not found", 404)
        case _:
            return reply("Method not allowed", 405)


def reply(content: str | bytes, status: int) -> Response:
    return Response(content, status, media_type="application/json")
