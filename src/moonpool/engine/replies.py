"""The OpenAI-compatible answers: whole bodies, stream chunks, errors. Plain JSON values, no HTTP."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from moonpool.engine.request import EngineClosed, GenerateResult, QueueFull, Usage
from moonpool.engine.sampling import TokenLogprob
from moonpool.errors import ContextTooLong, DeadlineExceeded, MoonpoolError, RequestError

Json: TypeAlias = dict[str, Any]
Style = Literal["completion", "chat"]


def usage_json(usage: Usage) -> Json:
    """`cached_tokens` counts every prompt token that was loaded instead of computed; `converted_tokens` of them came from
    another model's cache."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {
            "cached_tokens": usage.native + usage.converted,
            "converted_tokens": usage.converted,
        },
    }


def extension_json(result: GenerateResult) -> Json:
    """The answer's field `moonpool`: where the prompt's tokens came from and where the time went (seconds)."""
    t, u = result.timing, result.usage
    return {
        "tokens": {
            "native": u.native,
            "converted": u.converted,
            "computed": u.computed,
            "declined": u.declined,
            "shared": u.shared,
            "fused": u.fused,
            "drafted": u.drafted,
            "accepted": u.accepted,
            "replayed": u.replayed,
            "draft_native": u.draft_native,
            "draft_converted": u.draft_converted,
        },
        "bundles": [{"digest": d, "forced": d in u.forced} for d in u.bundles],
        "seconds": {
            "queue": t.queue,
            "lookup": t.lookup,
            "load": t.load,
            "prefill": t.prefill,
            "decode": t.decode,
            "draft": t.draft,
            "ttft": t.ttft,
            "total": t.total,
        },
    }


class Replies:
    """Builds the bodies of one answer; all of them carry the same id."""

    def __init__(self, style: Style, model: str, decode: Callable[[list[int]], str]) -> None:
        self._style, self._decode = style, decode
        kind = "chat.completion" if style == "chat" else "text_completion"
        prefix = "chatcmpl" if style == "chat" else "cmpl"
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._whole_kind = kind
        self._chunk_kind = f"{kind}.chunk" if style == "chat" else kind

    def whole(self, result: GenerateResult) -> Json:
        """The body of an answer that is not streamed."""
        said: Json = (
            {"message": {"role": "assistant", "content": result.text}}
            if self._style == "chat"
            else {"text": result.text}
        )
        choice = {"index": 0, **said, "logprobs": self._logprobs(result), "finish_reason": result.finish_reason}
        return {
            **self._head,
            "object": self._whole_kind,
            "choices": [choice],
            "usage": usage_json(result.usage),
            "moonpool": extension_json(result),
        }

    def chunk(self, text: str, finish: str | None = None, *, first: bool = False) -> Json:
        """One streamed piece; `first` names the speaker, `finish` ends the text."""
        if self._style == "chat":
            role = {"role": "assistant"} if first else {}
            said: Json = {"delta": {**role, **({} if finish else {"content": text})}}
        else:
            said = {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return {**self._head, "object": self._chunk_kind, "choices": [choice]}

    def usage_chunk(self, result: GenerateResult) -> Json:
        """The last chunk of a stream with `include_usage`: no choices."""
        return {
            **self._head,
            "object": self._chunk_kind,
            "choices": [],
            "usage": usage_json(result.usage),
            "moonpool": extension_json(result),
        }

    def _logprobs(self, result: GenerateResult) -> Json | None:
        if result.logprobs is None:
            return None
        if self._style == "chat":
            return {"content": [self._entry(p) for p in result.logprobs]}
        return {
            "tokens": [self._text(p.token) for p in result.logprobs],
            "token_logprobs": [p.logprob for p in result.logprobs],
            "top_logprobs": [{self._text(t): v for t, v in p.top} for p in result.logprobs],
        }

    def _entry(self, found: TokenLogprob) -> Json:
        top = [{"token": self._text(t), "logprob": v} for t, v in found.top]
        return {"token": self._text(found.token), "logprob": found.logprob, "top_logprobs": top}

    def _text(self, token: int) -> str:
        return self._decode([token])


def error_json(message: str, kind: str, code: str | None = None) -> Json:
    """OpenAI's error shape."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_reply(error: MoonpoolError) -> tuple[int, Json, dict[str, str]]:
    """(status, body, headers) for an error of the engine."""
    message = str(error)
    if isinstance(error, ContextTooLong):
        return 400, error_json(message, "invalid_request_error", "context_length_exceeded"), {}
    if isinstance(error, RequestError):
        return 400, error_json(message, "invalid_request_error"), {}
    if isinstance(error, QueueFull):
        return 429, error_json(message, "rate_limit_error", "queue_full"), {"Retry-After": "1"}
    if isinstance(error, EngineClosed):
        return 503, error_json(message, "server_error", "shutting_down"), {"Retry-After": "5"}
    if isinstance(error, DeadlineExceeded):
        return 504, error_json(message, "server_error", "deadline_exceeded"), {}
    return 500, error_json(message, "server_error"), {}
