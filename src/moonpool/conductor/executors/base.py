"""What executors share: the call, its two bodies, and two legs that end together."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from moonpool.conductor.registry import InstanceEntry
from moonpool.conductor.upstream import Answer, Upstream, UpstreamError

Json = dict[str, Any]

KEPT_FOR_PREFILL = frozenset(
    [
        *("model", "prompt", "messages", "tools", "tool_choice", "chat_template", "chat_template_kwargs", "cache_salt"),
        *("add_generation_prompt", "add_special_tokens", "temperature", "top_p", "top_k", "seed", "user", "priority"),
    ]
)
"""Fields that decide the prompt or its first token. All others are left out of the prefill's body: `stream_options`, `min_tokens`,
`n`, `logprobs` … make engines refuse one token, or send an answer that nobody reads."""


def _nothing() -> None: ...


@dataclass(frozen=True)
class Call:
    """One request on its way."""

    path: str
    raw: bytes
    """The client's body, as it came."""
    headers: dict[str, str]
    prefill: InstanceEntry
    decode: InstanceEntry
    id: str = ""
    first_token: Callable[[], None] = field(default=_nothing)
    """To be called when the prefill's result is there, where that is seen before the answer's first byte."""

    @cached_property
    def body(self) -> Json:
        found: Json = msgspec.json.decode(self.raw, type=dict[str, Any])
        return found

    def for_prefill(self, **more: Any) -> bytes:
        """The same prompt, one token, not streamed."""
        kept = {k: v for k, v in self.body.items() if k in KEPT_FOR_PREFILL}
        one: Json = {"max_tokens": 1, "stream": False}
        if "max_completion_tokens" in self.body:
            one["max_completion_tokens"] = 1
        return msgspec.json.encode({**kept, **one, **more})

    def for_decode(self, **more: Any) -> bytes:
        """The client's body with further fields; byte for byte the client's where there are none."""
        return msgspec.json.encode({**self.body, **more}) if more else self.raw


class Executor(ABC):
    @abstractmethod
    def answer(self, call: Call, upstream: Upstream) -> AbstractAsyncContextManager[Answer]:
        """The answer for the client. Leaving the block ends every leg. Raises UpstreamError that names the instance."""


async def whole(upstream: Upstream, instance: InstanceEntry, call: Call, body: bytes) -> bytes:
    """One leg whose answer is not for the client. Raises UpstreamError, also for a 4xx: then both legs' bodies are wrong, and the
    decode leg will tell the client."""
    async with upstream.post(instance, call.path, body, call.headers) as answer:
        said = await answer.whole()
        if answer.status >= 400:
            raise LegRefused(answer.status, said, instance.name)
        return said


class LegRefused(UpstreamError):
    """A leg was answered with a 4xx: the client's own mistake, to be passed on."""

    def __init__(self, status: int, body: bytes, key: str) -> None:
        super().__init__(f"answered {status}", key=key, status=status)
        self.body = body


@asynccontextmanager
async def together(upstream: Upstream, call: Call, prefill: bytes, decode: bytes) -> AsyncIterator[Answer]:
    """Both legs at once, for engines that meet each other. Whichever fails ends the other."""
    leg = asyncio.create_task(whole(upstream, call.prefill, call, prefill))
    opening = upstream.post(call.decode, call.path, decode, call.headers)
    begun = asyncio.ensure_future(opening.__aenter__())
    try:
        await asyncio.wait({leg, begun}, return_when=asyncio.FIRST_COMPLETED)
        if leg.done() and leg.exception() is not None:
            raise leg.exception() or UpstreamError("the prefill failed", key=call.prefill.name)
        if leg.done():
            call.first_token()
        answer = await begun
        watched = _Watched(answer, leg)
        yield watched
    finally:
        leg.cancel()
        if begun.done() and not begun.cancelled() and begun.exception() is None:
            await opening.__aexit__(None, None, None)
        else:
            begun.cancel()
        await asyncio.gather(leg, begun, return_exceptions=True)


class _Watched(Answer):
    """An answer that breaks off when the other leg fails."""

    def __init__(self, answer: Answer, leg: asyncio.Task[bytes]) -> None:
        self.status, self.headers = answer.status, answer.headers
        self._answer, self._leg = answer, leg

    @property
    def streamed(self) -> bool:
        return self._answer.streamed

    async def pieces(self) -> AsyncIterator[bytes]:
        async for piece in self._answer.pieces():
            if self._leg.done() and not self._leg.cancelled() and (failed := self._leg.exception()) is not None:
                raise failed
            yield piece
