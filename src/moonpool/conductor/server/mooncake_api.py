"""The HTTP API of Mooncake's conductor (an indexer): present helpers of engines and routers that speak it work against ours.

    POST /register  /unregister  /query  /query_by_hash        GET /services  /global_view

JSON or msgpack, by Content-Type. Unknown fields are ignored in JSON and refused in msgpack, as the original's two versions do; in
msgpack `token_ids` may be bytes of little-endian int32.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moonpool.conductor.indexer import Indexer, Query, Service
from moonpool.errors import RequestError

_MSGPACK = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")


class _Unregister(msgspec.Struct, frozen=True, kw_only=True):
    instance_id: str
    tenant_id: str = "default"
    dp_rank: int | None = None


def mooncake_routes(indexer: Indexer) -> list[Route]:
    async def register(body: dict[str, Any]) -> Any:
        indexer.register(_typed(body, Service))
        return {"status": "ok"}

    async def unregister(body: dict[str, Any]) -> Any:
        asked = _typed(body, _Unregister)
        keys = indexer.keys(asked.instance_id, asked.tenant_id, asked.dp_rank)
        for key in keys:
            indexer.unregister(key)
        return {"status": "ok", "removed_instances": keys}

    async def query(body: dict[str, Any]) -> Any:
        return indexer.query(_typed(body, Query))

    async def query_by_hash(body: dict[str, Any]) -> Any:
        return indexer.query_by_hash(_typed(body, Query))

    async def services(_: dict[str, Any]) -> Any:
        return {"services": indexer.services()}

    async def global_view(_: dict[str, Any]) -> Any:
        found = indexer.services()
        return {"instances": len({str(s["instance_id"]) for s in found}), "services": found}

    posts = {"/register": register, "/unregister": unregister, "/query": query, "/query_by_hash": query_by_hash}
    gets = {"/services": services, "/global_view": global_view}
    return [
        *(Route(path, _answered(run), methods=["POST"]) for path, run in posts.items()),
        *(Route(path, _answered(run), methods=["GET"]) for path, run in gets.items()),
    ]


def _answered(run: Callable[[dict[str, Any]], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        packed = request.headers.get("content-type", "").split(";")[0] in _MSGPACK
        encode = msgspec.msgpack.encode if packed else msgspec.json.encode
        media = _MSGPACK[0] if packed else "application/json"
        try:
            body = _body(await request.body(), packed) if request.method == "POST" else {}
            return Response(encode(await run(body)), media_type=media)
        except RequestError as e:
            said = {"error": "bad_request", "reason": str(e), "field": e.key, "index": None}
            return Response(encode(said), 400, media_type=media)

    return endpoint


def _body(raw: bytes, packed: bool) -> dict[str, Any]:
    try:
        found: Any = msgspec.msgpack.decode(raw) if packed else msgspec.json.decode(raw)
    except msgspec.DecodeError as e:
        raise RequestError(f"the body cannot be read: {e}") from e
    if not isinstance(found, dict):
        raise RequestError("the body is no object")
    if isinstance(ids := found.get("token_ids"), bytes):
        if len(ids) % 4:
            raise RequestError("token_ids are no 32-bit numbers", key="token_ids", have=f"{len(ids)} B")
        found["token_ids"] = array("I", ids).tolist()
    return {**found, "__strict__": True} if packed else found


def _typed(body: dict[str, Any], kind: type[Any]) -> Any:
    strict = body.pop("__strict__", False)
    if strict and (unknown := sorted(set(body) - set(kind.__struct_fields__))):
        raise RequestError("unknown field", key=unknown[0], need=", ".join(kind.__struct_fields__))
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as e:
        place = str(e).partition("`$.")[2].partition("`")[0]
        raise RequestError(str(e), key=place) from e
