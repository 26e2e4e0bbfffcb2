"""The routes of the caching APIs, for a server to mount.

POST, GET /v1/caching    GET, PUT, DELETE /v1/caching/{id}                                 Moonshot
POST, GET /v1/caching/refs/tags   GET, DELETE …/{tag}   GET …/{tag}/content
POST /v1/tokenizers/estimate-token-count
POST, GET /v1beta/cachedContents   GET, PATCH, DELETE /v1beta/cachedContents/{id}          Gemini
POST /v1beta/models/{model}:generateContent
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moonpool.conductor.caching import fields, gemini, moonshot
from moonpool.conductor.caching.backend import OWNER_HEADER, CachingBackend, seen, warm
from moonpool.conductor.caching.fields import Body
from moonpool.conductor.caching.pin import Pin
from moonpool.errors import ConfigError, MoonpoolError, NoSpace, NotFound, QuotaExceeded, RequestError

Endpoint = Callable[[Request], Awaitable[Response]]
Shape = Callable[[int, str], Body]
MAX_BODY = 32 << 20


def caching_routes(backend: CachingBackend) -> list[Route]:
    return [*_Moonshot(backend).routes(), *_Gemini(backend).routes()]


def status_of(error: MoonpoolError) -> int:
    match error:
        case RequestError() | ConfigError():
            return 400
        case NotFound():
            return 404
        case QuotaExceeded():
            return 429
        case NoSpace():
            return 503
    return 502


class _Api:
    def __init__(self, backend: CachingBackend, shape: Shape) -> None:
        self.backend, self._shape = backend, shape

    def route(self, path: str, endpoint: Endpoint, method: str) -> Route:
        async def run(request: Request) -> Response:
            try:
                return await endpoint(request)
            except MoonpoolError as e:
                status = status_of(e)
                return reply(self._shape(status, str(e)), status)

        return Route(path, run, methods=[method])

    def warming(self, pin: Pin) -> BackgroundTask | None:
        """Behind the reply, so that the client has the id at once."""
        return BackgroundTask(warm, self.backend, pin) if pin.alive else None


class _Moonshot(_Api):
    def __init__(self, backend: CachingBackend) -> None:
        super().__init__(backend, moonshot.error)

    def routes(self) -> list[Route]:
        tags = "/v1/caching/refs/tags"
        return [
            self.route("/v1/caching", self._create, "POST"),
            self.route("/v1/caching", self._list, "GET"),
            self.route(tags, self._tag, "POST"),
            self.route(tags, self._tags, "GET"),
            self.route(f"{tags}/{{tag}}", self._get_tag, "GET"),
            self.route(f"{tags}/{{tag}}", self._delete_tag, "DELETE"),
            self.route(f"{tags}/{{tag}}/content", self._content, "GET"),
            self.route("/v1/caching/{id}", self._get, "GET"),
            self.route("/v1/caching/{id}", self._update, "PUT"),
            self.route("/v1/caching/{id}", self._delete, "DELETE"),
            self.route("/v1/tokenizers/estimate-token-count", self._estimate, "POST"),
        ]

    async def _create(self, request: Request) -> Response:
        pin = await moonshot.create(self.backend, owner(request), await body_of(request))
        return reply(moonshot.view(self.backend, pin), background=self.warming(pin))

    async def _list(self, request: Request) -> Response:
        return reply(moonshot.listed(self.backend, owner(request), request.query_params))

    async def _get(self, request: Request) -> Response:
        id_ = moonshot.pin_id(request.path_params["id"])
        return reply(
            moonshot.view(self.backend, self.backend.pins.get(owner(request), id_, self.backend.now(), "moonshot"))
        )

    async def _update(self, request: Request) -> Response:
        pin = moonshot.update(self.backend, owner(request), request.path_params["id"], await body_of(request))
        return reply(moonshot.view(self.backend, pin), background=self.warming(seen(self.backend, pin)))

    async def _delete(self, request: Request) -> Response:
        return reply(moonshot.delete(self.backend, owner(request), request.path_params["id"]))

    async def _tag(self, request: Request) -> Response:
        return reply(moonshot.tag(self.backend, owner(request), await body_of(request)))

    async def _tags(self, request: Request) -> Response:
        return reply(moonshot.tags_listed(self.backend, owner(request), request.query_params))

    async def _get_tag(self, request: Request) -> Response:
        found = self.backend.tags.get(owner(request), request.path_params["tag"])
        return reply(moonshot.tag_view(owner(request), found))

    async def _content(self, request: Request) -> Response:
        pin = moonshot.tagged(self.backend, owner(request), request.path_params["tag"])
        return reply(moonshot.view(self.backend, pin))

    async def _delete_tag(self, request: Request) -> Response:
        return reply(moonshot.tag_deleted(self.backend, owner(request), request.path_params["tag"]))

    async def _estimate(self, request: Request) -> Response:
        body = await body_of(request)
        model = fields.text(body, "model", 256, needed=True)
        messages, tools = fields.objects(body, "messages", needed=True), fields.objects(body, "tools")
        found = await self.backend.tokenise(owner(request), model, messages, tools)
        return reply({"data": {"total_tokens": found.tokens}})


class _Gemini(_Api):
    def __init__(self, backend: CachingBackend) -> None:
        super().__init__(backend, gemini.error)

    def routes(self) -> list[Route]:
        caches = "/v1beta/cachedContents"
        return [
            self.route(caches, self._create, "POST"),
            self.route(caches, self._list, "GET"),
            self.route(f"{caches}/{{id}}", self._get, "GET"),
            self.route(f"{caches}/{{id}}", self._update, "PATCH"),
            self.route(f"{caches}/{{id}}", self._delete, "DELETE"),
            self.route("/v1beta/models/{model:path}:generateContent", self._generate, "POST"),
        ]

    async def _create(self, request: Request) -> Response:
        pin = await gemini.create(self.backend, owner(request), await body_of(request))
        return reply(gemini.view(pin), background=self.warming(pin))

    async def _list(self, request: Request) -> Response:
        return reply(gemini.listed(self.backend, owner(request), request.query_params))

    async def _get(self, request: Request) -> Response:
        return reply(gemini.view(gemini.get(self.backend, owner(request), request.path_params["id"])))

    async def _update(self, request: Request) -> Response:
        query = request.query_params
        mask = query.get("updateMask") or query.get("update_mask") or ""
        id_ = request.path_params["id"]
        return reply(gemini.view(gemini.update(self.backend, owner(request), id_, await body_of(request), mask)))

    async def _delete(self, request: Request) -> Response:
        pin = gemini.get(self.backend, owner(request), request.path_params["id"])
        self.backend.pins.delete(pin.owner, pin.id, self.backend.now())
        return reply({})

    async def _generate(self, request: Request) -> Response:
        model = request.path_params["model"]
        body, pin = gemini.chat_body(self.backend, owner(request), model, await body_of(request))
        said = await self.backend.complete(owner(request), body)
        return reply(gemini.answer(model, said, None if pin is None else gemini.saved(said, pin)))


def owner(request: Request) -> str:
    return request.headers.get(OWNER_HEADER, "")


async def body_of(request: Request) -> Body:
    """Raises RequestError."""
    size, parts = 0, list[bytes]()
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise RequestError("body too large", need=f"<= {MAX_BODY} B")
        parts.append(part)
    return fields.decoded(b"".join(parts))


def reply(content: Any, status: int = 200, background: BackgroundTask | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json", background=background)
