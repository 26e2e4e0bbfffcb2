"""Gemini's `cachedContents` (v1beta), and their use by `generateContent` or by a chat completion.

Text and function calls; a body with files or images is refused, as nothing behind the conductor would see them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from moonpool.conductor.caching import fields
from moonpool.conductor.caching.backend import CachingBackend, make
from moonpool.conductor.caching.fields import Body
from moonpool.conductor.caching.pin import Content, Pin, PinId
from moonpool.errors import NotFound, RequestError

PREFIX = "cachedContents/"
MAX_PAGE = 1000
_FIELDS = ("model", "contents", "systemInstruction", "tools", "displayName", "ttl", "expireTime", "name")
_SNAKE = {
    "system_instruction": "systemInstruction",
    "tool_config": "toolConfig",
    "display_name": "displayName",
    "expire_time": "expireTime",
    "cached_content": "cachedContent",
    "generation_config": "generationConfig",
}
_DURATION = re.compile(r"(\d{1,9})(\.\d{1,9})?s")


def pin_id(name: str) -> PinId:
    return name.removeprefix(PREFIX)


def model_name(given: str) -> str:
    return given.removeprefix("models/")


async def create(backend: CachingBackend, owner: str, given: Body) -> Pin:
    """Raises RequestError, QuotaExceeded, NoSpace."""
    body = _camel(given)
    fields.only(body, _FIELDS, "not supported")
    model = fields.text(body, "model", 256, needed=True)
    if not model.startswith("models/"):
        raise RequestError("not a model's resource name", key="model", need="models/…", have=model[:64])
    messages = _messages(body)
    if not messages:
        raise RequestError("needs contents or systemInstruction", key="contents")
    now = backend.now()
    original = {k: body[k] for k in ("contents", "systemInstruction", "tools") if body.get(k)}
    return await make(
        backend,
        "gemini",
        owner,
        model_name(model),
        Content(messages, _tools(body), original),
        _expires(body, now) or now + backend.pins.limits.ttl_s,
        name=fields.text(body, "displayName", 128),
    )


def get(backend: CachingBackend, owner: str, id_: str) -> Pin:
    """Raises NotFound: expired ones are gone."""
    pin = backend.pins.get(owner, pin_id(id_), backend.now(), "gemini")
    if pin.state == "inactive":
        raise NotFound("no such cached content: it expired", key=PREFIX + pin.id)
    return pin


def update(backend: CachingBackend, owner: str, id_: str, given: Body, mask: str) -> Pin:
    """Only its time can be changed. Raises RequestError, NotFound."""
    pin, body = get(backend, owner, id_), _camel(given)
    named = [_SNAKE.get(m.strip(), m.strip()) for m in mask.split(",") if m.strip()]
    if wrong := [m for m in named if m not in ("ttl", "expireTime")]:
        raise RequestError("only ttl and expireTime can be updated", key="updateMask", have=wrong[0][:64])
    fields.only(body, ("ttl", "expireTime", *_FIELDS), "unknown field")
    changed = {k: v for k, v in body.items() if k in ("ttl", "expireTime") and (not named or k in named)}
    expires = _expires(changed, backend.now())
    if expires is None:
        raise RequestError("needs ttl or expireTime", key="ttl")
    return backend.pins.reset_ttl(owner, pin.id, expires, backend.now())


def view(pin: Pin) -> Body:
    """Content is input only, as there."""
    return {
        "name": PREFIX + pin.id,
        "model": f"models/{pin.model}",
        "displayName": pin.name,
        "createTime": _stamp(pin.created),
        "updateTime": _stamp(pin.updated),
        "expireTime": _stamp(pin.expires),
        "usageMetadata": {"totalTokenCount": pin.tokens},
    }


def listed(backend: CachingBackend, owner: str, query: Mapping[str, str]) -> Body:
    """Raises RequestError: a page token that is none."""
    size = fields.whole(query.get("pageSize", "0"), "pageSize", 0, 1 << 31) or 100
    try:
        page = backend.pins.page(
            owner,
            "gemini",
            backend.now(),
            limit=min(int(size), MAX_PAGE),
            after=query.get("pageToken", ""),
            newest_first=False,
            keep=lambda p: p.state != "inactive",
        )
    except NotFound as e:
        raise RequestError("not a page's token, or its cache is gone", key="pageToken") from e
    found: Body = {"cachedContents": [view(p) for p in page.pins]} if page.pins else {}
    return {**found, "nextPageToken": page.pins[-1].id} if page.more else found


def _expires(body: Mapping[str, Any], now: float) -> float | None:
    ttl, at = body.get("ttl"), body.get("expireTime")
    if ttl is not None and at is not None:
        raise RequestError("give ttl or expireTime, not both", key="ttl")
    if ttl is not None:
        if not isinstance(ttl, str) or not _DURATION.fullmatch(ttl) or float(ttl[:-1]) <= 0:
            raise RequestError("not a duration above 0", key="ttl", need='"3600s"', have=str(ttl)[:32])
        return now + float(ttl[:-1])
    return None if at is None else _moment(at)


def _moment(given: Any) -> float:
    try:
        found = datetime.fromisoformat(given)
    except (TypeError, ValueError) as e:
        raise RequestError("not a point in time (RFC 3339)", key="expireTime", have=str(given)[:64]) from e
    if found.tzinfo is None:
        raise RequestError("a point in time needs its zone", key="expireTime", have=given[:64])
    return found.timestamp()


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _camel(body: Body) -> Body:
    return {_SNAKE.get(k, k): v for k, v in body.items()}


# -- Gemini's prompt as OpenAI's


def _messages(body: Mapping[str, Any]) -> list[Body]:
    found: list[Body] = []
    system = body.get("systemInstruction")
    if system:
        parts = [{"text": system}] if isinstance(system, str) else _parts(system, "systemInstruction")
        found.append({"role": "system", "content": "".join(_text(p, "systemInstruction") for p in parts)})
    for i, content in enumerate(fields.objects(body, "contents")):
        found += _turn(content, f"contents[{i}]")
    return found


def _parts(content: Any, where: str) -> list[Body]:
    parts = content.get("parts") if isinstance(content, dict) else None
    if not isinstance(parts, list) or not parts or not all(isinstance(p, dict) for p in parts):
        raise RequestError("needs parts", key=where)
    return parts


def _text(part: Body, where: str) -> str:
    if not isinstance(text := part.get("text"), str):
        kind = next(iter(part), "nothing")
        raise RequestError("only text and function calls are supported", key=f"{where}.parts", have=kind)
    return text


def _turn(content: Body, where: str) -> list[Body]:
    role = content.get("role", "user")
    if role not in ("user", "model", "function"):
        raise RequestError("no such role", key=f"{where}.role", need="user, model", have=str(role)[:32])
    text, calls, answers = "", list[Body](), list[Body]()
    for part in _parts(content, where):
        if isinstance(call := part.get("functionCall"), dict):
            spent = msgspec.json.encode(call.get("args") or {}).decode()
            id_ = str(call.get("id") or call.get("name", ""))
            calls.append(
                {"id": id_, "type": "function", "function": {"name": call.get("name", ""), "arguments": spent}}
            )
        elif isinstance(answer := part.get("functionResponse"), dict):
            said = msgspec.json.encode(answer.get("response") or {}).decode()
            id_ = str(answer.get("id") or answer.get("name", ""))
            answers.append({"role": "tool", "tool_call_id": id_, "content": said})
        else:
            text += _text(part, where)
    found = list(answers)
    if text or calls:
        message: Body = {"role": "assistant" if role == "model" else "user", "content": text}
        found.append({**message, "tool_calls": calls} if calls else message)
    return found


def _tools(body: Mapping[str, Any]) -> list[Body]:
    found: list[Body] = []
    for i, tool in enumerate(fields.objects(body, "tools")):
        made = tool.get("functionDeclarations", tool.get("function_declarations"))
        if not isinstance(made, list) or not all(isinstance(m, dict) for m in made):
            raise RequestError("only functionDeclarations are supported", key=f"tools[{i}]")
        found += [{"type": "function", "function": m} for m in made]
    return found


# -- use


_REQUEST = ("model", "contents", "systemInstruction", "tools", "cachedContent", "generationConfig")


def chat_body(backend: CachingBackend, owner: str, model: str, given: Body) -> tuple[Body, Pin | None]:
    """A generateContent body as a chat completion's, with the cached content before it. Raises RequestError, NotFound."""
    body = _camel(given)
    fields.only(body, _REQUEST, "not supported")
    messages, tools, pin = _messages(body), _tools(body), None
    if not fields.objects(body, "contents"):
        raise RequestError("needs contents", key="contents")
    if name := fields.text(body, "cachedContent", 256):
        pin = get(backend, owner, name)
        if clash := [k for k in ("systemInstruction", "tools") if body.get(k)]:
            raise RequestError("belongs into the cached content, not beside it", key=clash[0])
        if pin.model != model_name(model):
            raise RequestError("the cached content is of another model", key="model", need=pin.model, have=model)
        messages, tools = [*map(dict, pin.content.messages), *messages], list(pin.content.tools)
    found: Body = {"model": model_name(model), "messages": messages, **_generation(body.get("generationConfig") or {})}
    return ({**found, "tools": tools} if tools else found), pin


_OPTIONS = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
    "candidateCount": "n",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}


def _generation(options: Any) -> Body:
    if not isinstance(options, dict):
        raise RequestError("must be an object", key="generationConfig")
    fields.only(options, tuple(_OPTIONS), "not supported in generationConfig")
    return {_OPTIONS[k]: v for k, v in options.items()}


_ENDS = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}


def answer(model: str, reply: Mapping[str, Any], saved: int | None) -> Body:
    """A chat completion's reply as generateContent's. `saved`: tokens that the cached content saved, None without one."""
    usage = reply.get("usage") or {}
    spent = {
        "promptTokenCount": usage.get("prompt_tokens", 0),
        "candidatesTokenCount": usage.get("completion_tokens", 0),
        "totalTokenCount": usage.get("total_tokens", 0),
        **({} if saved is None else {"cachedContentTokenCount": saved}),
    }
    found = [_candidate(i, c) for i, c in enumerate(reply.get("choices") or [])]
    return {"candidates": found, "usageMetadata": spent, "modelVersion": model_name(model)}


def _candidate(index: int, choice: Mapping[str, Any]) -> Body:
    message = choice.get("message") or {}
    parts: list[Body] = [{"text": message["content"]}] if message.get("content") else []
    parts += _calls(message.get("tool_calls") or [])
    end = _ENDS.get(choice.get("finish_reason") or "", "STOP")
    return {"index": index, "content": {"role": "model", "parts": parts}, "finishReason": end}


def _calls(calls: Sequence[Mapping[str, Any]]) -> list[Body]:
    found: list[Body] = []
    for call in calls:
        function = call.get("function") or {}
        try:
            args = msgspec.json.decode(function.get("arguments") or "{}")
        except msgspec.DecodeError:  # a model's own writing: passed on as what it is
            args = {"arguments": function.get("arguments")}
        found.append({"functionCall": {"name": function.get("name", ""), "args": args}})
    return found


def error(status: int, message: str) -> Body:
    kinds = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}
    return {"error": {"code": status, "message": message, "status": kinds.get(status, "INTERNAL")}}


def saved(reply: Mapping[str, Any], pin: Pin) -> int:
    """Of a reply's cached tokens, the cached content's part."""
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    return min(int(details.get("cached_tokens") or 0), pin.saves)
