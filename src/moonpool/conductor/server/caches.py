"""Context caches on the live conductor: what the caching APIs ask for, answered by its readers, its index and its own front door."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import msgspec

from moonpool.conductor.caching.backend import OWNER_HEADER, Beginning, beginning
from moonpool.conductor.caching.pin import Pin
from moonpool.conductor.caching.pins import PinStore
from moonpool.conductor.caching.tags import Tags
from moonpool.conductor.server.exchange import Exchange
from moonpool.conductor.service import Conductor
from moonpool.conductor.types import InstanceId
from moonpool.errors import ConnectionLost, RequestError


class Caches:
    """`CachingBackend`. `serve` is set to the front door once there is one."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self.pins, self.tags = PinStore(random.Random()), Tags()
        self.serve: Any = None

    def now(self) -> float:
        return time.time()

    async def tokenise(
        self, owner: str, model: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
    ) -> Beginning:
        if model not in {i.entry.model for i in self._conductor.registry}:
            raise RequestError(f"no model `{model}`", key="model")
        return beginning(self._conductor.reader(model), owner, model, messages, tools)

    async def complete(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Through the front door, as a client would."""
        raw, said, status = msgspec.json.encode(body), list[bytes](), 0
        asked = False

        async def receive() -> MutableMapping[str, Any]:
            nonlocal asked
            if asked:
                await asyncio.Event().wait()  # nobody leaves
            asked = True
            return {"type": "http.request", "body": raw, "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            said.append(message.get("body", b""))

        headers = [(b"content-type", b"application/json"), (OWNER_HEADER.encode(), owner.encode("latin-1"))]
        await self.serve(Exchange({"path": "/v1/chat/completions", "headers": headers}, receive, send))
        if status != 200:
            raise ConnectionLost(f"answered {status}: {b''.join(said)[:200].decode('utf-8', 'replace')}")
        found: dict[str, Any] = msgspec.json.decode(b"".join(said), type=dict[str, Any])
        return found

    def holders(self, pin: Pin) -> frozenset[InstanceId]:
        cluster = self._conductor.model(pin.model).cluster
        blocks = len(pin.chain)
        return frozenset(i for i, depth in cluster.index.matches(pin.chain).items() if blocks and depth.sure >= blocks)
