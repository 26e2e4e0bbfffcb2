"""A caching backend without a fleet: the conductor's own prompt reader, a clock that is set, and a set of holders."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.testclient import TestClient

from moonpool.conductor.caching.backend import Beginning, beginning
from moonpool.conductor.caching.pin import Pin, PinLimits
from moonpool.conductor.caching.pins import PinStore
from moonpool.conductor.caching.routes import caching_routes
from moonpool.conductor.caching.tags import Tags
from moonpool.conductor.prompts import PromptBody, TextReader
from moonpool.conductor.types import Request
from moonpool.errors import RequestError, WireError

MODEL = "m"
SYSTEM = {
    "role": "system",
    "content": "You answer questions about the following book. " + "It was a long night. " * 300,
}
HELLO = {"role": "user", "content": "Who did it?"}


class FakeBackend:
    def __init__(self, limits: PinLimits = PinLimits()) -> None:
        self.pins, self.tags = PinStore(random.Random(3), limits), Tags(most=3)
        self.time = 1_700_000_000.0
        self.asked: list[Mapping[str, Any]] = []
        self.held: set[int] = set()
        """Ends of chains that the one instance holds."""
        self.broken = False
        self.reader = TextReader(MODEL)

    def now(self) -> float:
        return self.time

    async def tokenise(
        self, owner: str, model: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
    ) -> Beginning:
        if model != MODEL:
            raise RequestError(f"no model `{model}`")
        return beginning(self.reader, owner, model, messages, tools)

    async def complete(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.broken:
            raise WireError("nobody answers")
        self.asked.append(body)
        found = self.request(body, owner)
        cached = max((i + 1 for i, k in enumerate(found.chain.keys()) if k in self.held), default=0) * found.block_size
        self.held.update(found.chain.keys())
        usage: dict[str, Any] = {
            "prompt_tokens": found.tokens,
            "completion_tokens": 1,
            "total_tokens": found.tokens + 1,
        }
        usage |= {"prompt_tokens_details": {"cached_tokens": cached}}
        message = {"role": "assistant", "content": "The butler."}
        return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}

    def holders(self, pin: Pin) -> frozenset[str]:
        return frozenset(["i0"]) if pin.end in self.held else frozenset()

    def request(self, body: Mapping[str, Any], owner: str = "") -> Request:
        """As the front makes it."""
        asked = PromptBody(model=body["model"], messages=body["messages"], tools=body.get("tools"))
        found = self.reader.read(asked, owner)
        return Request(id="r", model=body["model"], chain=found.chain, tokens=found.tokens, block_size=found.block_size)


class Site:
    def __init__(self, limits: PinLimits = PinLimits()) -> None:
        self.backend = FakeBackend(limits)
        self.client = TestClient(Starlette(routes=caching_routes(self.backend)))

    def make(self, **fields: Any) -> dict[str, Any]:
        """A Moonshot cache."""
        answer = self.client.post("/v1/caching", json={"model": MODEL, "messages": [SYSTEM], **fields})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found
