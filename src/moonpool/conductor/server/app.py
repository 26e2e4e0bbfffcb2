"""The conductor's ASGI application.

POST /v1/chat/completions  /v1/completions            proxied (`front`)
GET  /v1/models
POST /v1/schedule        /v1/schedule/{id}/release    a decision without proxying, for those with a gateway of their own
GET  /instances          POST /instances   DELETE /instances/{id}   POST /instances/{id}/drain
GET  /debug/decisions    /health   /ready   /metrics   /
"""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from moonpool.conductor.caching.routes import caching_routes
from moonpool.conductor.indexer import Indexer
from moonpool.conductor.metrics import ConductorMetrics
from moonpool.conductor.prompts import PromptBody
from moonpool.conductor.registry import InstanceEntry
from moonpool.conductor.scheduler import Booked
from moonpool.conductor.server.caches import Caches
from moonpool.conductor.server.exchange import Exchange, Receive, Scope, Send, error_body
from moonpool.conductor.server.front import PATHS, Front, FrontOptions
from moonpool.conductor.server.mooncake_api import mooncake_routes
from moonpool.conductor.server.state import state
from moonpool.conductor.service import Conductor
from moonpool.conductor.types import Refusal, Request
from moonpool.errors import ConfigError, MoonpoolError, RequestError

Endpoint = Callable[[HttpRequest], Awaitable[Response]]
_PAGE = Path(__file__).with_name("dashboard.html")
_OPEN = frozenset({"/health", "/ready"})


class ConductorApp:
    """ASGI. `api_key`, if set, must come as a bearer token; /health and /ready are open."""

    def __init__(self, conductor: Conductor, *, api_key: str = "", routes: list[Route] | None = None) -> None:
        """`routes`: of others, mounted beside its own."""
        self.conductor, self._key = conductor, api_key
        options = FrontOptions(
            retries=conductor.config.retries, keep_alive_s=conductor.config.keep_alive_s, slo=conductor.config.slo
        )
        caches = Caches(conductor)
        self.front = Front(
            conductor.registry,
            conductor,
            conductor.reader,
            conductor.executor,
            lambda: conductor.upstream,
            options,
            conductor.clock,
            conductor.ended,
            caches,
        )
        caches.serve = self.front.serve
        self._metrics = CollectorRegistry()
        self._metrics.register(ConductorMetrics(conductor))
        self._booked: dict[str, Booked] = {}
        self._indexer = Indexer()
        mounted = [*caching_routes(caches), *mooncake_routes(self._indexer), *(routes or [])]
        self._app = Starlette(routes=[*self._routes(), *mounted])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._lifespan(receive, send)
        if scope["type"] != "http":
            return None
        if self._key and scope["path"] not in _OPEN and not self._allowed(scope):
            return await Exchange(scope, receive, send).json(
                401, error_body("no valid API key", "authentication_error")
            )
        if scope["path"] in PATHS and scope["method"] == "POST":
            return await self.front.serve(Exchange(scope, receive, send))
        await self._app(scope, receive, send)
        return None

    def _allowed(self, scope: Scope) -> bool:
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        return hmac.compare_digest(given, b"Bearer " + self._key.encode())

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.conductor.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._indexer.close()
        await self.conductor.stop()
        await send({"type": "lifespan.shutdown.complete"})

    def _routes(self) -> list[Route]:
        return [
            Route("/v1/models", _safe(self._models), methods=["GET"]),
            Route("/v1/schedule", _safe(self._schedule), methods=["POST"]),
            Route("/v1/schedule/{id}/release", _safe(self._release), methods=["POST"]),
            Route("/instances", _safe(self._instances), methods=["GET"]),
            Route("/instances", _safe(self._add), methods=["POST"]),
            Route("/instances/{id}", _safe(self._remove), methods=["DELETE"]),
            Route("/instances/{id}/drain", _safe(self._drain), methods=["POST"]),
            Route("/debug/decisions", _safe(self._decisions), methods=["GET"]),
            Route("/debug/state", _safe(self._state), methods=["GET"]),
            Route("/", _safe(self._page), methods=["GET"]),
            Route("/metrics", _safe(self._scrape), methods=["GET"]),
            Route("/health", _safe(self._health), methods=["GET"]),
            Route("/ready", _safe(self._ready), methods=["GET"]),
        ]

    # -- small ones

    async def _health(self, _: HttpRequest) -> Response:
        return _json({"status": "ok"})

    async def _ready(self, _: HttpRequest) -> Response:
        models = self.conductor.registry.models()
        return _json({"models": models}, 200 if models else 503)

    async def _models(self, _: HttpRequest) -> Response:
        """Of instances that are up; those that are not are no reason to fail."""
        models = [
            {"id": m, "object": "model", "created": 0, "owned_by": "moonpool"} for m in self.conductor.registry.models()
        ]
        return _json({"object": "list", "data": models})

    async def _scrape(self, _: HttpRequest) -> Response:
        return Response(generate_latest(self._metrics), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _state(self, _: HttpRequest) -> Response:
        return _json(state(self.conductor))

    async def _page(self, _: HttpRequest) -> Response:
        """The dashboard: one file, which asks for `/debug/state` every second."""
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        return Response(_PAGE.read_bytes(), media_type="text/html", headers={"content-security-policy": policy})

    async def _decisions(self, request: HttpRequest) -> Response:
        last = request.query_params.get("last", "100")
        if not last.isdigit():
            raise RequestError("not a number", key="last", have=last)
        return _json({"decisions": self.conductor.decisions(request.query_params.get("id", ""), int(last))})

    # -- instances

    async def _instances(self, _: HttpRequest) -> Response:
        now = self.conductor.clock()
        found = []
        for i in self.conductor.registry:
            ledger = self.conductor.model(i.entry.model).cluster.ledger
            found.append(
                {
                    **msgspec.to_builtins(i.entry),
                    "id": i.id,
                    "state": i.state,
                    "why": i.why,
                    "breaker": i.breaker.state(now),
                    "in_flight": i.in_flight,
                    "queue_s": round(ledger.queue_s(i.id, now), 4),
                    "decode_batch": ledger.batch(i.id),
                    "kv_events": self._feed(i.id),
                }
            )
        return _json({"instances": found})

    def _feed(self, instance: str) -> dict[str, Any] | None:
        """State of an instance's KV events; None where it publishes none."""
        feed = self.conductor.feeds.get(instance)
        if feed is None:
            return None
        t = feed.translator
        ranks = {str(rank): {"state": s.state, "last": s.last, "gaps": s.gaps} for rank, s in feed.sources.items()}
        counts = {
            "stored": t.stored,
            "removed": t.removed,
            "orphaned": t.orphaned,
            "refused": t.refused,
            "bad": feed.bad,
        }
        return {"ranks": ranks, **counts, "unknown": feed.unknown, "alarm": feed.alarm}

    async def _add(self, request: HttpRequest) -> Response:
        entry = _typed(await request.body(), InstanceEntry)
        new = self.conductor.add(entry)
        if new and (instance := self.conductor.registry.get(entry.name)):
            await self.conductor.probe(instance)
        return _json({"id": entry.name, "new": new}, 201 if new else 200)

    async def _remove(self, request: HttpRequest) -> Response:
        return self._found(request, self.conductor.remove(request.path_params["id"]))

    async def _drain(self, request: HttpRequest) -> Response:
        return self._found(request, self.conductor.drain(request.path_params["id"]))

    @staticmethod
    def _found(request: HttpRequest, found: bool) -> Response:
        id_ = request.path_params["id"]
        return _json({"id": id_}) if found else _json(error_body(f"no instance `{id_}`", code="not_found"), 404)

    # -- decisions without proxying

    async def _schedule(self, request: HttpRequest) -> Response:
        """A body as for /v1/completions or chat; `dry_run` books nothing. The lease ends with /release, or when it is overdue."""
        raw = await request.body()
        body = _typed(raw, PromptBody)
        if body.model not in {i.entry.model for i in self.conductor.registry}:
            raise RequestError(f"no model `{body.model}`")
        prompt = self.conductor.reader(body.model).read(body, request.headers.get("x-moonpool-tenant", ""))
        asked = Request(
            id=uuid.uuid4().hex,
            model=body.model,
            chain=prompt.chain,
            tokens=prompt.tokens,
            block_size=prompt.block_size,
            output_tokens=body.answer_tokens,
            session=request.headers.get("x-session-id") or body.prompt_cache_key,
            slo=self.conductor.config.slo,
            priority=body.priority,
        )
        now = self.conductor.clock()
        found = self.conductor.decide(asked, now)
        if isinstance(found, Refusal):
            return _json({"refusal": found}, 503 if found.stage == "pool" else 429)
        if request.query_params.get("dry_run"):
            found.failed(now)
        else:
            self._keep(asked.id, found)
        urls = {
            r: i.entry.url for r in ("prefill", "decode") if (i := self.conductor.registry.get(getattr(found.plan, r)))
        }
        plan = {**msgspec.to_builtins(found.plan), "predicted_ttft_s": found.plan.predicted.ttft_s}
        return _json({"id": asked.id, "plan": plan, "urls": urls})

    def _keep(self, id_: str, booked: Booked) -> None:
        self._booked = {k: b for k, b in self._booked.items() if b.lease.stage != "ended"}
        self._booked[id_] = booked

    async def _release(self, request: HttpRequest) -> Response:
        """`{"outcome": "first_token" | "finished" | "failed"}`; first_token is followed by one of the others."""
        booked = self._booked.get(request.path_params["id"])
        if booked is None:
            return _json(error_body("no such lease: released, overdue, or never booked", code="not_found"), 404)
        outcome = _typed(await request.body() or b'{"outcome": "finished"}', _Outcome).outcome
        now = self.conductor.clock()
        match outcome:
            case "first_token":
                booked.first_token(now)
            case "finished":
                booked.finished(now)
            case "failed":
                booked.failed(now)
            case _:
                raise RequestError("no such outcome", need="first_token, finished, failed", have=outcome)
        if outcome != "first_token":
            del self._booked[request.path_params["id"]]
        return _json({"stage": booked.lease.stage})


class _Outcome(msgspec.Struct, frozen=True):
    outcome: str = "finished"


def _safe(endpoint: Endpoint) -> Endpoint:
    async def run(request: HttpRequest) -> Response:
        try:
            return await endpoint(request)
        except (RequestError, ConfigError) as e:
            return _json(error_body(str(e)), 400)
        except MoonpoolError as e:
            return _json(error_body(str(e), "server_error"), 500)

    return run


def _typed(raw: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as e:
        raise RequestError(f"bad field: {e}") from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise RequestError(f"the body is not JSON: {e}") from e


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
