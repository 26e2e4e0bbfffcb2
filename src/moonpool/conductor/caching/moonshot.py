"""Moonshot's `/v1/caching`: parse, limits, shapes, and the two ways in which a completion refers to a cache.

Ids are `cache-…`. A cache is of one model name (here the conductor's), as its keys are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from moonpool.conductor.caching import fields
from moonpool.conductor.caching.backend import CachingBackend, make, seen
from moonpool.conductor.caching.fields import Body
from moonpool.conductor.caching.pin import Content, Pin, PinId
from moonpool.conductor.caching.tags import Tag
from moonpool.errors import RequestError

PREFIX = "cache-"
MAX_TTL_S = 3600
HEADER, RESET_HEADER, DRY_HEADER = (
    "x-msh-context-cache",
    "x-msh-context-cache-reset-ttl",
    "x-msh-context-cache-dryrun",
)


def pin_id(given: str) -> PinId:
    return given.removeprefix(PREFIX)


# -- caches


async def create(backend: CachingBackend, owner: str, body: Body) -> Pin:
    """Raises RequestError, QuotaExceeded, NoSpace."""
    model = fields.text(body, "model", 256, needed=True)
    messages = fields.objects(body, "messages", needed=True)
    if any(m.get("role") == "cache" for m in messages):
        raise RequestError("a cache cannot be made of a cache", key="messages")
    tags = body.get("tags") or []
    if not isinstance(tags, list) or not all(isinstance(t, str) for t in tags):
        raise RequestError("must be a list of strings", key="tags")
    pin = await make(
        backend,
        "moonshot",
        owner,
        model,
        Content(messages, fields.objects(body, "tools")),
        _expires(body, backend.now()) or backend.now() + MAX_TTL_S,
        name=fields.text(body, "name", 256),
        description=fields.text(body, "description", 512),
        metadata=fields.pairs(body.get("metadata")),
    )
    try:
        for tag in tags:
            backend.tags.set(owner, tag, pin.id, backend.now())
    except RequestError:
        _drop(backend, pin)
        raise
    return pin


def update(backend: CachingBackend, owner: str, id_: str, body: Body) -> Pin:
    """Raises RequestError, NotFound, QuotaExceeded."""
    now = backend.now()
    pin = backend.pins.get(owner, pin_id(id_), now, "moonshot")
    metadata = fields.pairs(body["metadata"]) if body.get("metadata") is not None else None
    return backend.pins.update(owner, pin.id, now, expires=_expires(body, now), metadata=metadata)


def delete(backend: CachingBackend, owner: str, id_: str) -> Body:
    """Its tags go with it. Raises NotFound."""
    pin = backend.pins.get(owner, pin_id(id_), backend.now(), "moonshot")
    _drop(backend, pin)
    return {"deleted": True, "id": PREFIX + pin.id, "object": "context_cache_object.deleted"}


def _drop(backend: CachingBackend, pin: Pin) -> None:
    backend.pins.delete(pin.owner, pin.id, backend.now())
    backend.tags.forget(pin.owner, pin.id)


def _expires(body: Body, now: float) -> float | None:
    """None: nothing is said; a given 0 is the default."""
    at, ttl = body.get("expired_at"), body.get("ttl")
    if at is not None and ttl is not None:
        raise RequestError("give expired_at or ttl, not both", key="ttl")
    if at:
        return now + fields.number(fields.number(at, "expired_at", 0, 1e12) - now, "expired_at - now", 1, MAX_TTL_S)
    if ttl:
        return now + fields.number(ttl, "ttl", 1, MAX_TTL_S)
    return None if at is None and ttl is None else now + MAX_TTL_S


def view(backend: CachingBackend, pin: Pin) -> Body:
    pin = seen(backend, pin)
    found: Body = {
        "id": PREFIX + pin.id,
        "object": "context_cache_object",
        "status": pin.state,
        "created_at": int(pin.created),
        "expired_at": int(pin.expires),
        "model": pin.model,
        "tokens": pin.tokens,
        "messages": list(pin.content.messages),
        "tools": list(pin.content.tools) or None,
        "name": pin.name,
        "description": pin.description,
        "metadata": pin.metadata,
        "tags": [t.tag for t in backend.tags.of(pin.owner, pin.id)],
        "uses": pin.uses,
        "tokens_saved": pin.saved,
    }
    return {**found, "error": {"type": "cache_error", "message": pin.error}} if pin.error else found


def listed(backend: CachingBackend, owner: str, query: Mapping[str, str]) -> Body:
    """Raises RequestError, NotFound (`after`, `before`)."""
    metadata = {k[9:-1]: v for k, v in query.items() if k.startswith("metadata[") and k.endswith("]")}
    page = backend.pins.page(
        owner,
        "moonshot",
        backend.now(),
        limit=_limit(query),
        after=pin_id(query.get("after", "")),
        before=pin_id(query.get("before", "")),
        newest_first=_newest_first(query),
        keep=lambda p: metadata.items() <= p.metadata.items(),
    )
    return {"object": "list", "data": [view(backend, p) for p in page.pins]}


def _limit(query: Mapping[str, str]) -> int:
    return fields.whole(query.get("limit", "20"), "limit", 1, 100)


def _newest_first(query: Mapping[str, str]) -> bool:
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("no such order", key="order", need="asc, desc", have=order[:32])
    return order == "desc"


# -- tags


def tag(backend: CachingBackend, owner: str, body: Body) -> Body:
    """Raises RequestError, NotFound (the cache), QuotaExceeded."""
    name, id_ = fields.text(body, "tag", 128, needed=True), fields.text(body, "cache_id", 128, needed=True)
    pin = backend.pins.get(owner, pin_id(id_), backend.now(), "moonshot")
    return tag_view(owner, backend.tags.set(owner, name, pin.id, backend.now()))


def tag_view(owner: str, found: Tag) -> Body:
    return {
        "cache_id": PREFIX + found.pin,
        "created_at": int(found.created),
        "object": "cache_object.tag",
        "owned_by": owner,
        "tag": found.tag,
    }


def tag_deleted(backend: CachingBackend, owner: str, name: str) -> Body:
    backend.tags.delete(owner, name)
    return {"deleted": True, "object": "cache_object.tag.deleted", "owned_by": owner, "tag": name}


def tagged(backend: CachingBackend, owner: str, name: str) -> Pin:
    """Raises NotFound: the tag, or its cache."""
    return backend.pins.get(owner, backend.tags.get(owner, name).pin, backend.now(), "moonshot")


def tags_listed(backend: CachingBackend, owner: str, query: Mapping[str, str]) -> Body:
    """`after`, `before`: tags. Raises RequestError, NotFound."""
    found = backend.tags.of(owner)
    if _newest_first(query):
        found.reverse()
    names = [t.tag for t in found]
    edges = {e: names.index(backend.tags.get(owner, query[e]).tag) for e in ("after", "before") if query.get(e)}
    found = found[edges.get("after", -1) + 1 : edges.get("before", len(found))][: _limit(query)]
    return {"object": "list", "data": [tag_view(owner, t) for t in found]}


# -- use


class Reference(msgspec.Struct, frozen=True):
    """What a completion says of a cache."""

    id: PinId = ""
    tag: str = ""
    reset_ttl: int = 0
    """Seconds; 0 = leave it."""
    dry_run: bool = False
    instead: bool = False
    """The first message stands for the cached ones."""


def reference(body: Mapping[str, Any], headers: Mapping[str, str]) -> Reference | None:
    """Raises RequestError. `headers`: names in lower case."""
    messages = body.get("messages")
    said = _cache_message(messages) if isinstance(messages, list) else None
    given = headers.get(HEADER)
    if said is not None and given:
        raise RequestError("give the header or the cache message, not both", key=HEADER)
    if said is not None:
        if body.get("tools") is not None:
            raise RequestError("must be null: the tools are the cache's", key="tools")
        return _of_message(said)
    if not given:
        return None
    dry, ttl = headers.get(DRY_HEADER, "0"), headers.get(RESET_HEADER, "0")
    return Reference(pin_id(given), "", _ttl(ttl, RESET_HEADER), _flag(dry, DRY_HEADER))


def _cache_message(messages: Sequence[Any]) -> str | None:
    at = [i for i, m in enumerate(messages) if isinstance(m, dict) and m.get("role") == "cache"]
    if not at:
        return None
    if at != [0]:
        raise RequestError("one message of role cache may be there, the first", key=f"messages[{at[-1]}]")
    content = messages[0].get("content")
    if not isinstance(content, str):
        raise RequestError("must be a string", key="messages[0].content")
    return content


def _of_message(said: str) -> Reference:
    where = "messages[0].content"
    options: dict[str, str] = {}
    for part in said.split(";"):
        name, equals, value = part.partition("=")
        if not equals or not value or name in options or name not in ("cache_id", "tag", "reset_ttl", "dry_run"):
            raise RequestError("not an option of a cache message", key=where, have=part[:64])
        options[name] = value
    if ("cache_id" in options) == ("tag" in options):
        raise RequestError("needs cache_id or tag, and not both", key=where)
    return Reference(
        pin_id(options.get("cache_id", "")),
        options.get("tag", ""),
        _ttl(options.get("reset_ttl", "0"), where),
        _flag(options.get("dry_run", "0"), where),
        instead=True,
    )


def _ttl(given: str, where: str) -> int:
    return fields.whole(given, where, 0, MAX_TTL_S)


def _flag(given: str, where: str) -> bool:
    if given not in ("0", "1"):
        raise RequestError("must be 0 or 1", key=where, have=given[:32])
    return given == "1"


def hits(pin: Pin, body: Mapping[str, Any]) -> bool:
    """Whether the first messages and the tools are exactly the cached ones."""
    messages, cached = body.get("messages"), list(pin.content.messages)
    if not isinstance(messages, list) or body.get("model") != pin.model:
        return False
    return messages[: len(cached)] == cached and (body.get("tools") or []) == list(pin.content.tools)


def expanded(pin: Pin, body: Mapping[str, Any]) -> Body:
    """With the cached messages and tools in the place of the cache message."""
    messages = [*pin.content.messages, *body["messages"][1:]]
    found = {k: v for k, v in body.items() if k != "tools"}
    return {**found, "messages": messages, **({"tools": list(pin.content.tools)} if pin.content.tools else {})}


def reply_headers(pin: Pin, saved: int) -> dict[str, str]:
    return {
        "msh-context-cache-id": PREFIX + pin.id,
        "msh-context-cache-token-saved": str(saved),
        "msh-context-cache-token-exp": str(int(pin.expires)),
    }


def error(status: int, message: str) -> Body:
    kinds = {404: "resource_not_found_error", 429: "exceeded_current_quota_error", 503: "engine_overloaded_error"}
    return {
        "error": {
            "message": message,
            "type": kinds.get(status, "invalid_request_error" if status < 500 else "server_error"),
        }
    }
