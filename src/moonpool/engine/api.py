"""The OpenAI-compatible requests: typed bodies, and how they become a `GenerateRequest`.

Fields that would change the answer and that this engine does not support are refused with the reason, never ignored. Other
unknown fields (`user`, `store`, …) are ignored, as clients send many.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from moonpool.engine.instance import Instance
from moonpool.engine.request import GenerateRequest
from moonpool.engine.sampling import SamplingParams
from moonpool.errors import RequestError

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of /v1/completions. A chat answer may fill the context."""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class Extension(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request field `moonpool`. It is ours, so a misspelt name is an error."""

    allow_converted: bool | None = None
    wait_converted_s: float = 0.0
    speculate: bool = True


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chat completions share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str = ""
    """As in vLLM: requests of different salts share no pages."""
    moonpool: Extension = Extension()
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def refusals(self) -> list[tuple[str, bool]]:
        """(field, whether it asks for something that is not supported)."""
        return [
            ("n", self.n not in (None, 1)),
            ("presence_penalty", bool(self.presence_penalty)),
            ("frequency_penalty", bool(self.frequency_penalty)),
            ("logit_bias", bool(self.logit_bias)),
        ]

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(Common, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def refusals(self) -> list[tuple[str, bool]]:
        own = [("echo", bool(self.echo)), ("suffix", bool(self.suffix)), ("best_of", self.best_of not in (None, 1))]
        return [*super().refusals(), *own, ("logprobs with stream", self.logprobs is not None and bool(self.stream))]

    def tokens(self, instance: Instance) -> list[int]:
        """The prompt's token ids. Raises RequestError for more than one prompt."""
        given: object = self.prompt
        if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int):
            given = given[0]
        if isinstance(given, str):
            return instance.encode(given) if given else []
        if isinstance(given, list) and all(isinstance(t, int) for t in given):
            return list(given)
        raise RequestError("one prompt a request", fix="Send a string, or one list of token ids.")

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def answer_tokens(self, room: int) -> int:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class Part(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[Part] | None = None

    def plain(self) -> dict[str, str]:
        """Role and text, as chat templates take them. Raises RequestError for parts that are no text."""
        if isinstance(self.content, list):
            other = next((p.type for p in self.content if p.type != "text"), None)
            if other is not None:
                raise RequestError(f"content of type `{other}` is not supported", need="text")
            return {"role": self.role, "content": "".join(p.text for p in self.content)}
        return {"role": self.role, "content": self.content or ""}


class ChatBody(Common, frozen=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    def refusals(self) -> list[tuple[str, bool]]:
        formatted = (self.response_format or {}).get("type", "text") != "text"
        own = [("tools", bool(self.tools)), ("response_format", formatted)]
        return [*super().refusals(), *own, ("logprobs with stream", bool(self.logprobs) and bool(self.stream))]

    def tokens(self, instance: Instance) -> list[int]:
        """The conversation's token ids. Raises RequestError."""
        if not self.messages:
            raise RequestError("no messages", need="at least one")
        return instance.encode_chat([m.plain() for m in self.messages])

    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def answer_tokens(self, room: int) -> int:
        wish = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return max(1, room) if wish is None else wish


Body = TypeVar("Body", CompletionBody, ChatBody)


def parse_body(raw: bytes, kind: type[Body]) -> Body:
    """The typed body. Raises RequestError: not UTF-8, not JSON, a wrong type (with its place), or an unsupported wish."""
    try:
        raw.decode("utf-8")
        body = msgspec.json.decode(raw, type=kind)
    except UnicodeDecodeError as e:
        raise RequestError(f"the body is not UTF-8 (byte {e.start})", need="UTF-8 JSON") from e
    except msgspec.ValidationError as e:
        raise RequestError(f"bad field: {e}") from e
    except msgspec.DecodeError as e:
        raise RequestError(f"the body is not JSON: {e}") from e
    refused = [field for field, asked in body.refusals() if asked]
    if refused:
        raise RequestError(f"not supported: {', '.join(refused)}", fix="Leave it out.")
    return body


def to_request(body: CompletionBody | ChatBody, instance: Instance) -> GenerateRequest:
    """Tokenize and fill in the API's defaults. Raises RequestError; `Instance.submit` checks the rest."""
    prompt = body.tokens(instance)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return GenerateRequest(
        prompt=prompt,
        max_tokens=body.answer_tokens(instance.spec.max_positions - len(prompt)),
        sampling=SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=body.seed,
        ),
        stop=tuple(stop),
        logprobs=body.wanted_logprobs(),
        allow_converted=body.moonpool.allow_converted,
        wait_converted_s=body.moonpool.wait_converted_s,
        speculate=body.moonpool.speculate,
        salt=body.cache_salt,
    )
