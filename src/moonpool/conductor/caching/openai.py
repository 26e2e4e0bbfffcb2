"""OpenAI's `prompt_cache_key` and `prompt_cache_retention`: automatic caching with two wishes.

The key goes where sessions go (the conductor's affinity). A retention of 24h makes a pin of the whole prompt: the next turn of the
dialogue begins with it, and lets the pin grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from moonpool.conductor.caching import fields
from moonpool.conductor.caching.fields import Body
from moonpool.conductor.caching.pin import Pin, Wanted
from moonpool.conductor.caching.pins import PinStore
from moonpool.conductor.types import Chain
from moonpool.errors import NoSpace, RequestError

MIN_TOKENS, STEP = 1024, 128
RETENTION_S = {"in_memory": 0.0, "in-memory": 0.0, "24h": 86400.0}
"""How long a pin is kept; 0 = none: the engines' own caches decide."""


class Wish(msgspec.Struct, frozen=True):
    key: str = ""
    retention_s: float = 0.0


def wish(body: Mapping[str, Any]) -> Wish:
    """Raises RequestError."""
    key = fields.text(body, "prompt_cache_key", 64)
    retention = body.get("prompt_cache_retention")
    if retention is None:
        return Wish(key)
    if not isinstance(retention, str) or retention not in RETENTION_S:
        raise RequestError(
            "no such retention", key="prompt_cache_retention", need="in_memory, 24h", have=str(retention)[:32]
        )
    return Wish(key, RETENTION_S[retention])


def keep(
    pins: PinStore, owner: str, model: str, chain: Chain, tokens: int, block_size: int, asked: Wish, now: float
) -> Pin | None:
    """A pin of the prompt, if one is wished for and the prompt is long enough. Never an error: who is over quota gets none."""
    if not asked.retention_s or tokens < MIN_TOKENS or not len(chain):
        return None
    wanted = Wanted(
        source="openai",
        owner=owner,
        model=model,
        chain=chain,
        tokens=tokens,
        block_size=block_size,
        expires=now + asked.retention_s,
        name=asked.key,
    )
    try:
        return pins.grow(wanted, now)
    except NoSpace:
        return None


def cached_tokens(cached: int) -> int:
    """As OpenAI reports it: in steps, and nothing below the minimum."""
    return cached // STEP * STEP if cached >= MIN_TOKENS else 0


def with_cached(reply: Body, cached: int) -> Body:
    """`usage.prompt_tokens_details.cached_tokens`, where the engine did not say it."""
    usage = reply.get("usage")
    if not isinstance(usage, dict):
        return reply
    details = usage.get("prompt_tokens_details") or {}
    if details.get("cached_tokens") is not None:
        return reply
    return {**reply, "usage": {**usage, "prompt_tokens_details": {**details, "cached_tokens": cached_tokens(cached)}}}
