"""vLLM's MooncakeConnector (0.29 and later): the router names the transfer, and both engines meet by that name.

The prefill's answer carries no parameters. The decode call names the prefill's engine, which its bootstrap server tells:
`GET http://<bootstrap>/query` → {"<dp rank>": {"engine_id": …}, …}.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from moonpool.conductor.executors.base import Call, Executor, together
from moonpool.conductor.registry import InstanceEntry
from moonpool.conductor.upstream import Answer, Upstream, UpstreamError
from moonpool.errors import ConfigError

_REMEMBERED_S = 300.0
"""An engine's id changes when it restarts."""
_ASK_S = 5.0


class MooncakeExecutor(Executor):
    def __init__(self) -> None:
        self._engines: dict[str, tuple[float, str]] = {}

    @asynccontextmanager
    async def answer(self, call: Call, upstream: Upstream) -> AsyncIterator[Answer]:
        transfer = uuid.uuid4().hex
        engine = await self._engine(call.prefill, upstream)
        common = {"transfer_id": transfer}
        prefill = call.for_prefill(kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False, **common})
        where = {"remote_bootstrap_addr": f"http://{call.prefill.bootstrap}", "remote_engine_id": engine}
        decode = call.for_decode(
            kv_transfer_params={"do_remote_decode": False, "do_remote_prefill": True, **where, **common}
        )
        try:
            async with together(upstream, call, prefill, decode) as answer:
                yield answer
        except UpstreamError:
            self._engines.pop(call.prefill.name, None)  # it may have restarted under another id
            raise

    async def _engine(self, instance: InstanceEntry, upstream: Upstream) -> str:
        if not instance.bootstrap:
            raise ConfigError("no bootstrap server", key=instance.name, need="bootstrap: host:port")
        known = self._engines.get(instance.name)
        if known and time.monotonic() < known[0] + _REMEMBERED_S:
            return known[1]
        status, said = await upstream.get(f"http://{instance.bootstrap}/query", _ASK_S)
        try:
            ranks = msgspec.json.decode(said, type=dict[str, dict[str, Any]])
            engine = str(ranks[min(ranks, key=int)]["engine_id"])
        except (msgspec.DecodeError, msgspec.ValidationError, KeyError, ValueError) as e:
            raise UpstreamError(
                f"its bootstrap server answered {status} without an engine_id", key=instance.name
            ) from e
        self._engines[instance.name] = time.monotonic(), engine
        return engine
