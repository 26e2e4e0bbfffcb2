"""Prefill, then decode, through a store that both instances use: two hops, one after the other.

`store` needs nothing of the engines but that store (vLLM with a store connector, for example): the prompt is prefilled for one token,
and the decode instance finds its pages. `moonpool` hands over more: the first token and the last, partial page, so that the decode
instance computes nothing of the prompt again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from moonpool.conductor.executors.base import Call, Executor, whole
from moonpool.conductor.upstream import Answer, Upstream, UpstreamError


class StoreExecutor(Executor):
    @asynccontextmanager
    async def answer(self, call: Call, upstream: Upstream) -> AsyncIterator[Answer]:
        if call.prefill.name != call.decode.name:
            await whole(upstream, call.prefill, call, call.for_prefill())
            call.first_token()
        async with upstream.post(call.decode, call.path, call.raw, call.headers) as answer:
            yield answer


class MoonpoolExecutor(Executor):
    """The built-in engine's legs (docs/conductor.md)."""

    @asynccontextmanager
    async def answer(self, call: Call, upstream: Upstream) -> AsyncIterator[Answer]:
        body = call.raw
        if call.prefill.name != call.decode.name:
            own: dict[str, Any] = dict(call.body.get("moonpool") or {})
            said = await whole(upstream, call.prefill, call, call.for_decode(moonpool={**own, "leg": "prefill"}))
            call.first_token()
            body = call.for_decode(moonpool={**own, "leg": "decode", "first": _hand_over(said, call.prefill.name)})
        async with upstream.post(call.decode, call.path, body, call.headers) as answer:
            yield answer


def _hand_over(said: bytes, instance: str) -> Any:
    try:
        return msgspec.json.decode(said, type=dict[str, Any])["moonpool"]
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError) as e:
        raise UpstreamError("the prefill's answer has no hand-over", key=instance) from e
