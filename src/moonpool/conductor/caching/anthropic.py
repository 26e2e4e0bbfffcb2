"""Anthropic's `cache_control`: break points in a messages body, each the end of a beginning that is kept.

The prompt's order is tools, system, messages; every tool, system block and content block counts as one *block* of the body, which is
not a block of a chain.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from moonpool.conductor.caching.backend import Beginning, CachingBackend, shared
from moonpool.conductor.caching.fields import Body
from moonpool.conductor.caching.pin import Pin, Wanted
from moonpool.errors import NoSpace, RequestError

MOST = 4
LOOK_BACK = 20
"""A break point finds what was kept at it or at one of the blocks before it, so many in all."""
TTL_S = {"5m": 300.0, "1h": 3600.0}
MIN_TOKENS = 1024
"""Shorter beginnings are not kept, and no error. Anthropic's models have 512 to 4096."""
_POSITION = "position"


class BreakPoint(msgspec.Struct, frozen=True):
    """All of the body up to and with block number `position` (from 1), as an OpenAI-style prompt."""

    position: int
    ttl_s: float
    messages: list[Body]
    tools: list[Body]


class _Block(msgspec.Struct, frozen=True):
    where: str
    control: Any
    group: int
    """-2 tools, -1 system, then the message's number."""
    role: str
    content: Body


def break_points(body: Mapping[str, Any]) -> list[BreakPoint]:
    """In order. Raises RequestError: too many, on what cannot be kept, or a longer time behind a shorter one.

    `cache_control` of the body itself stands for one at the last block that can bear it.
    """
    blocks = _blocks(body)
    times = {i: _ttl(b.control, b.where) for i, b in enumerate(blocks) if b.control is not None}
    for i in times:
        if why := _unfit(blocks[i].content):
            raise RequestError(why, key=f"{blocks[i].where}.cache_control")
    whole = body.get("cache_control")
    if whole is not None:
        last = max((i for i, b in enumerate(blocks) if not _unfit(b.content)), default=None)
        if last is not None:
            times.setdefault(last, _ttl(whole, "body"))
    if len(times) > MOST:
        raise RequestError("too many blocks with cache_control", need=f"<= {MOST}", have=str(len(times)))
    found: list[BreakPoint] = []
    for i, ttl in sorted(times.items()):
        if found and ttl > found[-1].ttl_s:
            raise RequestError(
                "a longer ttl must come before a shorter one", key=f"{blocks[i].where}.cache_control.ttl"
            )
        messages, tools = _prompt(blocks[: i + 1])
        found.append(BreakPoint(i + 1, ttl, messages, tools))
    return found


def prompt(body: Mapping[str, Any]) -> tuple[list[Body], list[Body]]:
    """The whole body as OpenAI-style messages and tools. Raises RequestError."""
    return _prompt(_blocks(body))


def _blocks(body: Mapping[str, Any]) -> list[_Block]:
    tools = _list(body.get("tools") or [], "tools")
    found = [_block(f"tools[{i}]", t, -2, "") for i, t in enumerate(tools)]
    found += _said("system", -1, "system", body.get("system") or [])
    for i, message in enumerate(_list(body.get("messages"), "messages")):
        found += _said(f"messages[{i}].content", i, str(message.get("role", "")), message.get("content"))
    return found


def _said(where: str, group: int, role: str, content: Any) -> list[_Block]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else _list(content, where)
    return [_block(f"{where}[{i}]", p, group, role) for i, p in enumerate(parts)]


def _block(where: str, given: Body, group: int, role: str) -> _Block:
    content = {k: v for k, v in given.items() if k != "cache_control"}
    return _Block(where, given.get("cache_control"), group, role, content)


def _list(found: Any, where: str) -> list[Body]:
    if not isinstance(found, list) or not all(isinstance(f, dict) for f in found):
        raise RequestError("must be a list of objects", key=where)
    return found


def _unfit(content: Body) -> str:
    """Why a block cannot be the end of what is kept; empty if it can."""
    kind = content.get("type")
    if kind in ("thinking", "redacted_thinking"):
        return "thinking blocks cannot have cache_control"
    return "empty text cannot have cache_control" if kind == "text" and not content.get("text") else ""


def _ttl(control: Any, where: str) -> float:
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise RequestError("must be of type ephemeral", key=f"{where}.cache_control")
    ttl = control.get("ttl", "5m")
    if not isinstance(ttl, str) or ttl not in TTL_S:
        raise RequestError("no such ttl", key=f"{where}.cache_control.ttl", need=", ".join(TTL_S), have=str(ttl)[:32])
    return TTL_S[ttl]


def _prompt(blocks: Sequence[_Block]) -> tuple[list[Body], list[Body]]:
    tools = [b.content for b in blocks if b.group == -2]
    rest = itertools.groupby((b for b in blocks if b.group > -2), key=lambda b: (b.group, b.role))
    return [{"role": role, "content": "".join(_text(b.content) for b in parts)} for (_, role), parts in rest], tools


def _text(content: Body) -> str:
    """What is no text counts as its JSON: equal where it is equal, but not as an engine reads it."""
    if content.get("type") == "text" and isinstance(text := content.get("text"), str):
        return text
    return msgspec.json.encode(content, order="deterministic").decode()


# -- use


class Cached(msgspec.Struct, frozen=True):
    """What a request finds, and what it leaves."""

    pin: Pin | None
    """That it begins with: the longest."""
    read: int
    created: dict[str, int]
    """Tokens by time to live."""

    def usage(self, input_tokens: int, output_tokens: int) -> Body:
        """`input_tokens`: of the whole prompt; Anthropic's are those behind the last break point."""
        created = sum(self.created.values())
        return {
            "input_tokens": max(0, input_tokens - self.read - created),
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": self.read,
            "cache_creation": {f"ephemeral_{name}_input_tokens": self.created.get(name, 0) for name in TTL_S},
            "output_tokens": output_tokens,
        }


async def cached(
    backend: CachingBackend, owner: str, body: Mapping[str, Any], *, min_tokens: int = MIN_TOKENS
) -> Cached:
    """Looks the body's break points up, and keeps those that are long enough. Raises RequestError.

    Who is over quota gets no new pins, and no error.
    """
    model = str(body.get("model", ""))
    points = break_points(body)
    if not points:
        return Cached(None, 0, {})
    whole = await backend.tokenise(owner, model, *prompt(body))
    ends: list[tuple[BreakPoint, Beginning]] = []
    for point in points:
        found = await backend.tokenise(owner, model, point.messages, point.tools)
        # What closes a message that is cut off at the break point is no part of the whole prompt.
        chain = shared(found.chain, whole.chain)
        if len(chain) and found.tokens >= min_tokens:
            ends.append((point, Beginning(chain, found.tokens, found.block_size)))
    now = backend.now()
    pin = _found(backend, owner, model, ends, now)
    created = _created(ends, pin.tokens if pin else 0)
    for point, end in ends:
        try:
            backend.pins.ensure(_wanted(owner, model, point, end, now), now)
        except NoSpace:
            break
    return Cached(pin, pin.tokens if pin else 0, created)


def _found(
    backend: CachingBackend, owner: str, model: str, ends: Sequence[tuple[BreakPoint, Beginning]], now: float
) -> Pin | None:
    for point, end in reversed(ends):
        pin = backend.pins.match(owner, model, end.chain, now, "anthropic")
        if pin is not None and point.position - LOOK_BACK < int(pin.metadata[_POSITION]) <= point.position:
            return pin
    return None


def _created(ends: Sequence[tuple[BreakPoint, Beginning]], read: int) -> dict[str, int]:
    """Tokens that are kept anew, each by the first break point that they lie before."""
    created: dict[str, int] = {}
    done = read
    for point, end in ends:
        name = next(n for n, s in TTL_S.items() if s == point.ttl_s)
        created[name] = created.get(name, 0) + max(0, end.tokens - done)
        done = max(done, end.tokens)
    return created


def _wanted(owner: str, model: str, point: BreakPoint, end: Beginning, now: float) -> Wanted:
    return Wanted(
        source="anthropic",
        owner=owner,
        model=model,
        chain=end.chain,
        tokens=end.tokens,
        block_size=end.block_size,
        expires=now + point.ttl_s,
        metadata={_POSITION: str(point.position)},
    )


def error(status: int, message: str) -> Body:
    kinds = {404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
