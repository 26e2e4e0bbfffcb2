"""The proxied routes: choose, book, call, stream. One `_Trip` for each request owns its lease and releases it in every way out.

body ─► prompt ─► decide ─► executor ─► bytes to the client, untouched
           429 + Retry-After ◄┘    └─► another instance, as long as no byte is out
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
from msgspec.structs import replace

from moonpool.conductor.caching import fields
from moonpool.conductor.caching import proxy as context
from moonpool.conductor.caching.backend import OWNER_HEADER, CachingBackend
from moonpool.conductor.caching.proxy import Use
from moonpool.conductor.executors.base import Call, Executor, LegRefused
from moonpool.conductor.prompts import Prompt, PromptBody, PromptReader
from moonpool.conductor.registry import Registry
from moonpool.conductor.server.exchange import Exchange, Gone, Headers, error_body, unless_gone
from moonpool.conductor.types import SLO, Plan, Refusal, Request
from moonpool.conductor.upstream import HOP_BY_HOP, Answer, Upstream, UpstreamError
from moonpool.errors import ConfigError, MoonpoolError, NotFound, RequestError

PATHS = frozenset(["/v1/chat/completions", "/v1/completions"])
_INLINE_CHARACTERS = 1 << 16
"""Longer bodies are tokenised on a thread: 128 Ki tokens take a tenth of a second and more."""
_OURS = frozenset(
    [
        *("x-session-id", "x-slo-ttft-ms", "x-slo-tbt-ms", OWNER_HEADER),
        *("x-msh-context-cache", "x-msh-context-cache-reset-ttl", "x-msh-context-cache-dryrun"),
    ]
)
"""Headers that are for the conductor, and go no further."""
KEEP_ALIVE = b": waiting\n\n"


class Booking(Protocol):
    """A plan that is paid for: the instances' load includes it until it ends."""

    plan: Plan

    def first_token(self, now: float) -> None: ...

    def finished(self, now: float) -> None: ...

    def failed(self, now: float) -> None: ...


class Decider(Protocol):
    def decide(self, request: Request, now: float) -> Booking | Refusal: ...


class FrontOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    retries: int = 2
    """Further instances that a request is tried on, as long as no byte has gone out."""
    keep_alive_s: float = 0.0
    """SSE comments while a streamed answer has not begun, so that clients do not time out; 0 = none."""
    slo: SLO = SLO()


class Front:
    """ASGI for `PATHS`."""

    def __init__(
        self,
        registry: Registry,
        decider: Decider,
        reader: Callable[[str], PromptReader],
        executor: Callable[[str], Executor],
        upstream: Callable[[], Upstream],
        options: FrontOptions = FrontOptions(),
        clock: Callable[[], float] = time.monotonic,
        ended: Callable[[Request, Plan, str, float, float], None] | None = None,
        caches: CachingBackend | None = None,
    ) -> None:
        """`reader` and `executor`: of a model. `ended(request, plan, outcome, ttft, total)` is told of each request. `caches`:
        context caches that bodies may refer to."""
        self.registry, self.decider, self.reader, self.executor = registry, decider, reader, executor
        self.upstream, self.options, self.clock, self.ended = upstream, options, clock, ended
        self.caches = caches

    async def serve(self, exchange: Exchange) -> None:
        """Answers, whatever happens. Raises nothing but cancellation."""
        try:
            raw = await exchange.body()
            use = self._cached(exchange, raw)
            if use is not None and use.answer is not None:
                return await exchange.json(200, use.answer, _raw(use.headers))
            if use is not None and use.changed:
                raw = msgspec.json.encode(use.body)
            body = _decoded(raw)
            request = await self._request(exchange, body)
            if use is not None and self.caches is not None:
                request = replace(request, pinned=context.holders(self.caches, use, request))
            await unless_gone(exchange, _Trip(self, exchange, raw, body, request, use).run())
        except Gone:
            pass
        except NotFound as e:
            await _refuse(exchange, 404, error_body(str(e), code="not_found"))
        except RequestError as e:
            await _refuse(exchange, 400, error_body(str(e)))
        except MoonpoolError as e:
            await _refuse(exchange, 502, error_body(str(e), "upstream_error"))

    def _cached(self, exchange: Exchange, raw: bytes) -> Use | None:
        """What the body says of context caches; None where it says nothing and there are none. Raises RequestError, NotFound."""
        owner = exchange.headers.get(OWNER_HEADER, "")
        if self.caches is None:
            return None
        self.caches.pins.expire(self.caches.now())
        if context.mentions(raw, exchange.headers):
            return context.apply(self.caches, owner, fields.decoded(raw), exchange.headers)
        return Use(owner, {}) if len(self.caches.pins) else None

    async def _request(self, exchange: Exchange, body: PromptBody) -> Request:
        known = {i.entry.model for i in self.registry}
        if body.model not in known:
            have = ", ".join(sorted(known)) or "none"
            raise _NoModel(f"no model `{body.model}`; there is {have}")
        headers = exchange.headers
        prompt = await self._prompt(body, headers.get(OWNER_HEADER, ""))
        slo = self.options.slo
        return Request(
            id=headers.get("x-request-id") or uuid.uuid4().hex,
            model=body.model,
            chain=prompt.chain,
            tokens=prompt.tokens,
            block_size=prompt.block_size,
            output_tokens=body.answer_tokens,
            session=headers.get("x-session-id") or body.prompt_cache_key or body.user,
            slo=SLO(_ms(headers, "x-slo-ttft-ms", slo.ttft_s), _ms(headers, "x-slo-tbt-ms", slo.tbt_s)),
            priority=body.priority,
        )

    async def _prompt(self, body: PromptBody, tenant: str) -> Prompt:
        reader = self.reader(body.model)
        size = (
            len(body.prompt or "") if body.messages is None else sum(len(str(m.get("content"))) for m in body.messages)
        )
        if size <= _INLINE_CHARACTERS:
            return reader.read(body, tenant)
        return await asyncio.to_thread(reader.read, body, tenant)


class _NoModel(RequestError):
    """The name is no instance's."""


class _Trip:
    """One request from its decision to its end."""

    def __init__(
        self, front: Front, exchange: Exchange, raw: bytes, body: PromptBody, request: Request, use: Use | None
    ) -> None:
        self._front, self._x, self._raw, self._body, self._request = front, exchange, raw, body, request
        self._use, self._more = use, list[tuple[bytes, bytes]]()
        self._began = front.clock()
        self._first: float | None = None
        self._tried = 0

    async def run(self) -> None:
        while True:
            booked = self._front.decider.decide(self._request, self._front.clock())
            if isinstance(booked, Refusal):
                return await self._refused(booked)
            try:
                return await self._attempt(booked)
            except UpstreamError as e:
                self._tried += 1
                if self._x.begun or self._tried > self._front.options.retries:
                    return await self._broken(e)

    async def _attempt(self, booked: Booking) -> None:
        """One plan, carried out. Its lease ends here, in every way out."""
        front, plan, outcome = self._front, booked.plan, "aborted"
        if self._use is not None and front.caches is not None and not self._tried:
            self._more = _raw(context.settle(front.caches, self._use, self._request, plan.cached_tokens))
        used = [i for i in (front.registry.get(plan.prefill), front.registry.get(plan.decode)) if i is not None]
        if not used or len(used) < 2:
            booked.failed(front.clock())
            raise UpstreamError("the instance has just left", key=plan.prefill)
        for instance in {i.id: i for i in used}.values():
            instance.in_flight += 1
            instance.breaker.started(front.clock())
        try:
            call = Call(
                self._x.path,
                self._raw,
                self._forwarded(),
                used[0].entry,
                used[1].entry,
                self._request.id,
                lambda: self._token(booked),
            )
            async with front.executor(self._request.model).answer(call, front.upstream()) as answer:
                await self._relay(answer, booked)
            outcome = "ok" if answer.status < 400 else "refused_upstream"
        except LegRefused as e:
            outcome = "refused_upstream"
            await self._x.start(e.status, [(b"content-type", b"application/json"), *self._headers(plan)])
            await self._x.end(e.body)
        except UpstreamError as e:
            outcome = "failed"
            for instance in used:
                if e.key in (instance.id, "") or instance.entry.url in e.key:
                    instance.breaker.failed(front.clock())
            raise
        finally:
            self._release(booked, outcome)
            for instance in {i.id: i for i in used}.values():
                instance.in_flight -= 1
                instance.breaker.succeeded(front.clock()) if outcome == "ok" else instance.breaker.abandoned()

    def _release(self, booked: Booking, outcome: str) -> None:
        now = self._front.clock()
        if outcome in ("ok", "refused_upstream"):
            booked.finished(now)
        else:
            booked.failed(now)
        if self._front.ended:
            first = (self._first or now) - self._began
            self._front.ended(self._request, booked.plan, outcome, first, now - self._began)

    def _token(self, booked: Booking) -> None:
        if self._first is None:
            self._first = self._front.clock()
            booked.first_token(self._first)

    async def _relay(self, answer: Answer, booked: Booking) -> None:
        await self._x.start(answer.status, [*answer.headers, *self._headers(booked.plan)])
        async for piece in answer.pieces():
            self._token(booked)
            self._front.registry.alive(booked.plan.decode)
            await self._x.piece(piece)
        await self._x.end()

    def _headers(self, plan: Plan) -> Headers:
        predicted = f"{plan.predicted.ttft_s * 1000:.1f}"
        return [
            (b"x-request-id", self._request.id.encode("latin-1", "replace")),
            (b"x-conductor-prefill", plan.prefill.encode()),
            (b"x-conductor-decode", plan.decode.encode()),
            (b"x-conductor-matched-tokens", str(plan.cached_tokens).encode()),
            (b"x-conductor-predicted-ttft-ms", predicted.encode()),
            (b"x-conductor-policy", plan.policy.encode()),
            *self._more,
        ]

    def _forwarded(self) -> dict[str, str]:
        kept = {k: v for k, v in self._x.headers.items() if k.encode("latin-1") not in HOP_BY_HOP and k not in _OURS}
        return {**kept, "x-request-id": self._request.id}

    async def _refused(self, refusal: Refusal) -> None:
        if refusal.stage == "pool":
            await self._x.json(503, error_body(refusal.why, "overloaded_error", "no_instance"))
            return
        wait = str(max(1, round(refusal.retry_after_s))).encode()
        body = error_body(refusal.why, "rate_limit_exceeded", f"slo_{refusal.stage}")
        await self._x.json(429, body, [(b"retry-after", wait)])

    async def _broken(self, error: UpstreamError) -> None:
        """No instance could answer. Behind the first byte the connection is cut, so that nobody takes half for a whole."""
        if self._x.begun:
            raise error
        await self._x.json(502, error_body(str(error), "upstream_error"))


def _raw(headers: Mapping[str, str]) -> Headers:
    return [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]


async def _refuse(exchange: Exchange, status: int, content: object) -> None:
    if not exchange.begun:
        await exchange.json(status, content)


def _decoded(raw: bytes) -> PromptBody:
    try:
        return msgspec.json.decode(raw, type=PromptBody)
    except msgspec.ValidationError as e:
        raise RequestError(f"bad field: {e}") from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise RequestError(f"the body is not JSON: {e}") from e


def _ms(headers: dict[str, str], name: str, default: float) -> float:
    given = headers.get(name)
    if given is None:
        return default
    try:
        value = float(given)
    except ValueError as e:
        raise RequestError("not a number of milliseconds", key=name, have=given) from e
    if not 0 < value < 1e9:
        raise RequestError("not a number of milliseconds", key=name, have=given, need="> 0")
    return value / 1000


__all__ = ["PATHS", "Booking", "ConfigError", "Decider", "Front", "FrontOptions"]
