"""The HTTP front of one or several instances: OpenAI-compatible, on Starlette.

    POST /v1/completions  /v1/chat/completions      GET /v1/models  /health  /metrics

The event loop only moves bytes: tokenizing runs in the thread pool, the model on the instance's own thread.
A client that goes away aborts its request, streamed or not.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TypeAlias

import msgspec
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from moonpool.engine.api import ChatBody, CompletionBody, parse_body, to_request
from moonpool.engine.instance import Instance
from moonpool.engine.metrics import EngineMetrics
from moonpool.engine.replies import Json, Replies, error_json, error_reply
from moonpool.engine.request import Event, GenerateResult, Handle, Piece
from moonpool.errors import MoonpoolError

MAX_BODY_BYTES = 8 << 20
BODY_DEADLINE_S = 60.0
_WATCH_S = 0.2
"""How often a request looks whether its client is still there."""

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


class _Refused(Exception):
    """An answer that ends the request early."""

    def __init__(self, status: int, body: Json) -> None:
        super().__init__(status)
        self.status, self.body = status, body


class EngineApp:
    """The routes. `api_key`, if set, must come as a bearer token; /health is open. `collectors` add to /metrics."""

    def __init__(
        self, instances: Mapping[str, Instance], *, api_key: str = "", collectors: Sequence[Collector] = ()
    ) -> None:
        self._instances, self._api_key = dict(instances), api_key
        self._metrics = EngineMetrics(self._instances, collectors)
        guard = self._guard
        self.asgi = Starlette(
            routes=[
                Route("/v1/completions", guard(self._completions), methods=["POST"]),
                Route("/v1/chat/completions", guard(self._chat), methods=["POST"]),
                Route("/v1/models", guard(self._models), methods=["GET"]),
                Route("/metrics", guard(self._scrape), methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _http_error},
        )

    # -- small endpoints

    async def _health(self, _: Request) -> Response:
        closed = [name for name, i in self._instances.items() if i.closed]
        return _json({"status": "closing" if closed else "ok", "models": list(self._instances)}, 503 if closed else 200)

    async def _models(self, _: Request) -> Response:
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "moonpool"} for name in self._instances]
        return _json({"object": "list", "data": models})

    async def _scrape(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # -- generation

    async def _completions(self, request: Request) -> Response:
        return await self._serve(request, parse_body(await _read(request), CompletionBody))

    async def _chat(self, request: Request) -> Response:
        return await self._serve(request, parse_body(await _read(request), ChatBody))

    async def _serve(self, request: Request, body: CompletionBody | ChatBody) -> Response:
        instance = self._instances.get(body.model)
        if instance is None:
            have = ", ".join(self._instances)
            text = f"no model `{body.model}`; there is {have}"
            raise _Refused(404, error_json(text, "invalid_request_error", "model_not_found"))
        replies = Replies("chat" if isinstance(body, ChatBody) else "completion", body.model, instance.decode)
        events, handle = await self._submit(instance, body)
        watched = _watch(request, events, handle)
        if body.stream:
            stream = self._sse(body, replies, watched)
            return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        async with aclosing(watched):
            async for event in watched:
                if isinstance(event, GenerateResult):
                    self._metrics.observe(body.model, event)
                    return _json(replies.whole(event))
        return Response(status_code=499)  # the client went away; nobody reads this

    async def _submit(self, instance: Instance, body: CompletionBody | ChatBody) -> tuple[asyncio.Queue[Event], Handle]:
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def on_event(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        def begin() -> Handle:
            return instance.submit(to_request(body, instance), on_event)

        return events, await run_in_threadpool(begin)

    async def _sse(
        self, body: CompletionBody | ChatBody, replies: Replies, watched: AsyncGenerator[Piece | GenerateResult, None]
    ) -> AsyncGenerator[bytes, None]:
        usage: Json = {"usage": None} if body.include_usage else {}
        first = True
        try:
            async for event in watched:
                if isinstance(event, Piece):
                    yield _data({**replies.chunk(event.text, first=first), **usage})
                    first = False
                    continue
                self._metrics.observe(body.model, event)
                yield _data({**replies.chunk("", event.finish_reason, first=first), **usage})
                if body.include_usage:
                    yield _data(replies.usage_chunk(event))
                yield b"data: [DONE]\n\n"
        except MoonpoolError as e:  # the status line is long gone; the client gets the error as an event
            yield _data(error_reply(e)[1])

    # -- around every endpoint

    def _guard(self, endpoint: Endpoint) -> Endpoint:
        async def guarded(request: Request) -> Response:
            try:
                self._authorize(request)
                return await endpoint(request)
            except _Refused as e:
                return _json(e.body, e.status)
            except MoonpoolError as e:
                status, body, headers = error_reply(e)
                return _json(body, status, headers)
            except ClientDisconnect:
                return Response(status_code=499)

        return guarded

    def _authorize(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")
        if self._api_key and not hmac.compare_digest(given, f"Bearer {self._api_key}".encode()):
            raise _Refused(401, error_json("missing or wrong API key", "authentication_error", "invalid_api_key"))


async def _read(request: Request) -> bytes:
    """The body, refused as soon as it is known to be too large, so that memory is never taken for it."""
    refused = _Refused(
        413, error_json(f"the body is larger than {MAX_BODY_BYTES} B", "invalid_request_error", "body_too_large")
    )
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise refused
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise refused
    except TimeoutError:
        text = f"the body did not arrive within {BODY_DEADLINE_S:g} s"
        raise _Refused(408, error_json(text, "invalid_request_error", "body_timeout")) from None
    return bytes(body)


async def _watch(
    request: Request, events: asyncio.Queue[Event], handle: Handle
) -> AsyncGenerator[Piece | GenerateResult, None]:
    """The request's events up to its result; ends early, and aborts the request, when the client is gone.

    Raises the error that the request ended with. Whoever stops iterating must close this iterator (Starlette does).
    """
    loop = asyncio.get_running_loop()
    look = loop.time() + _WATCH_S
    try:
        while True:
            if loop.time() >= look:  # also when tokens come faster than this
                if await request.is_disconnected():
                    return
                look = loop.time() + _WATCH_S
            try:
                event = await asyncio.wait_for(events.get(), max(0.001, look - loop.time()))
            except TimeoutError:
                continue
            if isinstance(event, MoonpoolError):
                raise event
            yield event
            if isinstance(event, GenerateResult):
                return
    finally:
        handle.abort()


async def _http_error(_: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the same error shape."""
    assert isinstance(error, HTTPException)
    return _json(error_json(error.detail, "invalid_request_error"), error.status_code)


def _json(body: Json, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def _data(body: Json) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
