"""Caches on the way of a completion: before it is decided (`apply`), and once its plan is known (`settle`).

`apply` puts cached messages where a body refers to them. A header that names a cache which is not there, or not this prompt's, is a
miss: the request is served all the same, without the reply headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from moonpool.conductor.caching import gemini, moonshot, openai
from moonpool.conductor.caching.backend import CachingBackend, seen
from moonpool.conductor.caching.fields import Body
from moonpool.conductor.caching.openai import Wish
from moonpool.conductor.caching.pin import Pin
from moonpool.conductor.types import InstanceId, Request
from moonpool.errors import NoSpace, NotFound, RequestError

_WORDS = (b'"cache"', b"prompt_cache_retention", b"prompt_cache_key", b"cached_content")


class Use(msgspec.Struct, frozen=True):
    """What a body says of caches."""

    owner: str
    body: Mapping[str, Any]
    """To be decided and sent on."""
    changed: bool = False
    """Whether it is another than came."""
    pin: Pin | None = None
    """That it refers to, and hits."""
    wish: Wish = Wish()
    answer: Body | None = None
    """Of a dry run: this is the reply, and no engine is asked."""
    headers: Mapping[str, str] = {}
    """Of that reply."""


def mentions(raw: bytes, headers: Mapping[str, str]) -> bool:
    """Whether `apply` is worth its parsing. False for most."""
    return moonshot.HEADER in headers or any(word in raw for word in _WORDS)


def apply(backend: CachingBackend, owner: str, body: Body, headers: Mapping[str, str]) -> Use:
    """`headers`: names in lower case. Raises RequestError; NotFound where a cache that stands for messages is not there."""
    wish = openai.wish(body)
    if (name := _google(body)) is not None:
        return _of_gemini(backend, owner, body, name, wish)
    asked = moonshot.reference(body, headers)
    if asked is None:
        return Use(owner, body, wish=wish)
    try:
        pin = _referred(backend, owner, asked)
    except NotFound:
        if asked.instead:
            raise
        pin = None
    changed = pin is not None and asked.instead
    whole = moonshot.expanded(pin, body) if pin is not None and asked.instead else body
    if pin is not None and not moonshot.hits(pin, whole):
        pin = None
    if asked.dry_run:
        return _dry(owner, whole, pin)
    if pin is not None and asked.reset_ttl:
        pin = _reset(backend, pin, asked.reset_ttl)
    return Use(owner, whole, changed, pin if pin is not None and pin.alive else None, wish)


def settle(backend: CachingBackend, use: Use, request: Request, cached_tokens: int) -> dict[str, str]:
    """The plan is known: `cached_tokens` of its prompt need not be computed → headers for the reply.

    Counts what the pin saved, that of a body which refers to none included; and keeps the prompt, where the body wishes that.
    """
    now = backend.now()
    pin = use.pin or backend.pins.match(use.owner, request.model, request.chain, now)
    saved = backend.pins.used(pin.id, cached_tokens, now) if pin is not None and cached_tokens else 0
    openai.keep(
        backend.pins, use.owner, request.model, request.chain, request.tokens, request.block_size, use.wish, now
    )
    return (
        moonshot.reply_headers(use.pin, saved) if use.pin is not None and use.pin.source == "moonshot" and saved else {}
    )


def holders(backend: CachingBackend, use: Use, request: Request) -> frozenset[InstanceId]:
    """For `Request.pinned`: who holds the pin that the prompt begins with."""
    pin = use.pin or backend.pins.match(use.owner, request.model, request.chain, backend.now())
    return backend.holders(pin) if pin is not None else frozenset()


def _referred(backend: CachingBackend, owner: str, asked: moonshot.Reference) -> Pin:
    if asked.tag:
        return seen(backend, moonshot.tagged(backend, owner, asked.tag))
    return seen(backend, backend.pins.get(owner, asked.id, backend.now(), "moonshot"))


def _reset(backend: CachingBackend, pin: Pin, ttl: int) -> Pin:
    now = backend.now()
    try:
        return backend.pins.reset_ttl(pin.owner, pin.id, now + ttl, now)
    except NoSpace:  # an expired one that there is no quota for any more
        return pin


def _dry(owner: str, body: Mapping[str, Any], pin: Pin | None) -> Use:
    answer: Body = {
        "id": "dry-run",
        "object": "chat.completion",
        "created": 0,
        "model": body.get("model", ""),
        "choices": [],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
    hit = pin is not None and pin.state == "ready"
    return Use(owner, body, answer=answer, headers=moonshot.reply_headers(pin, pin.saves) if pin and hit else {})


def _google(body: Mapping[str, Any]) -> str | None:
    """`{"extra_body": {"google": {"cached_content": name}}}`, as Gemini's OpenAI-compatible API takes it."""
    extra = body.get("extra_body")
    google = extra.get("google") if isinstance(extra, dict) else None
    if not isinstance(google, dict) or google.get("cached_content") is None:
        return None
    name = google["cached_content"]
    if not isinstance(name, str) or not name:
        raise RequestError("must be a name", key="extra_body.google.cached_content")
    return name


def _of_gemini(backend: CachingBackend, owner: str, body: Body, name: str, wish: Wish) -> Use:
    pin = gemini.get(backend, owner, name)
    messages = body.get("messages")
    if (
        body.get("tools")
        or not isinstance(messages, list)
        or any(isinstance(m, dict) and m.get("role") == "system" for m in messages)
    ):
        raise RequestError("tools and system messages belong into the cached content, not beside it", key="messages")
    if body.get("model") not in (pin.model, f"models/{pin.model}"):
        raise RequestError("the cached content is of another model", key="model", need=pin.model)
    whole = {k: v for k, v in body.items() if k != "extra_body"}
    whole |= {"model": pin.model, "messages": [*pin.content.messages, *messages]}
    if pin.content.tools:
        whole["tools"] = list(pin.content.tools)
    return Use(owner, whole, True, pin if pin.alive else None, wish)
