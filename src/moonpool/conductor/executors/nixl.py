"""vLLM's NixlConnector: the prefill's answer says where its blocks lie, and the decode call repeats it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from moonpool.conductor.executors.base import Call, Executor, whole
from moonpool.conductor.upstream import Answer, Upstream, UpstreamError

_ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class NixlExecutor(Executor):
    @asynccontextmanager
    async def answer(self, call: Call, upstream: Upstream) -> AsyncIterator[Answer]:
        said = await whole(upstream, call.prefill, call, call.for_prefill(kv_transfer_params=_ASKED))
        call.first_token()
        body = call.for_decode(kv_transfer_params=_params(said, call.prefill.name))
        async with upstream.post(call.decode, call.path, body, call.headers) as answer:
            yield answer


def _params(said: bytes, instance: str) -> Any:
    try:
        found = msgspec.json.decode(said, type=dict[str, Any]).get("kv_transfer_params")
    except (msgspec.DecodeError, msgspec.ValidationError) as e:
        raise UpstreamError(f"the prefill's answer is no JSON object: {e}", key=instance) from e
    if not found:
        raise UpstreamError("the prefill's answer has no kv_transfer_params: is its connector on?", key=instance)
    return found
