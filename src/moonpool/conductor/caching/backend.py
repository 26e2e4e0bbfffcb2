"""What the APIs need of the conductor: a facade that tests replace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from moonpool.conductor.caching.pin import Content, Pin, Source, Wanted
from moonpool.conductor.caching.pins import PinStore
from moonpool.conductor.caching.tags import Tags
from moonpool.conductor.chain import KeyChain
from moonpool.conductor.prompts import Prompt, PromptBody, PromptReader
from moonpool.conductor.types import Chain, InstanceId
from moonpool.errors import MoonpoolError, RequestError

OWNER_HEADER = "x-moonpool-tenant"
"""Whose caches: the same header that parts prompts. It is trusted as it is there."""


class Beginning(msgspec.Struct, frozen=True):
    """The beginning of prompts, cut into blocks."""

    chain: Chain
    """The blocks that every prompt which begins so has, and no more."""
    tokens: int
    block_size: int


class CachingBackend(Protocol):
    pins: PinStore
    tags: Tags

    def now(self) -> float:
        """Unix seconds: clients read and write points in time."""
        ...

    async def tokenise(
        self, owner: str, model: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
    ) -> Beginning:
        """Raises RequestError: no such model, or messages that its template refuses."""
        ...

    async def complete(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A chat completion through the conductor, not streamed. Raises MoonpoolError: nobody could answer."""
        ...

    def holders(self, pin: Pin) -> frozenset[InstanceId]:
        """Those that hold all of its blocks, as far as the index knows."""
        ...


def beginning(
    reader: PromptReader, owner: str, model: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
) -> Beginning:
    """`CachingBackend.tokenise` by a prompt reader. Raises RequestError.

    A template writes more behind the last message than other messages leave there (the turn of the assistant), and the last
    block reaches into what follows. So the messages are read with two different ones behind them: what both have is the beginning.
    """

    def read(*followers: dict[str, Any]) -> Prompt:
        body = PromptBody(model=model, messages=[*map(dict, messages), *followers], tools=list(tools) or None)
        return reader.read(body, owner)

    alone = read()
    ends, refused = list[Prompt](), list[RequestError]()
    for role, said in (("user", "Z"), ("assistant", "."), ("user", "."), ("assistant", "Z")):
        if len(ends) < 2:  # the later ones are for templates that want the roles in turn: one role is refused
            try:
                ends.append(read({"role": role, "content": said}))
            except RequestError as e:
                refused.append(e)
    if len(ends) < 2:
        raise refused[0]
    return Beginning(shared(ends[0].chain, ends[1].chain), alone.tokens, alone.block_size)


def shared(first: Chain, second: Chain) -> Chain:
    """The blocks that both begin with."""
    mine, others = first.keys(), second.keys()
    count = next((i for i, (a, b) in enumerate(zip(mine, others, strict=False)) if a != b), min(len(mine), len(others)))
    return KeyChain(list(mine[:count]))


async def make(
    backend: CachingBackend,
    source: Source,
    owner: str,
    model: str,
    content: Content,
    expires: float,
    *,
    name: str = "",
    description: str = "",
    metadata: dict[str, str] | None = None,
) -> Pin:
    """A pin of this content, not warmed yet. Raises RequestError, QuotaExceeded, NoSpace."""
    found = await backend.tokenise(owner, model, content.messages, content.tools)
    wanted = Wanted(
        source=source,
        owner=owner,
        model=model,
        chain=found.chain,
        tokens=found.tokens,
        block_size=found.block_size,
        expires=expires,
        name=name,
        description=description,
        metadata=metadata or {},
        content=content,
    )
    return backend.pins.create(wanted, backend.now())


async def warm(backend: CachingBackend, pin: Pin) -> None:
    """Lets an instance compute it, unless enough hold it. What fails is told by the pin's state."""
    if len(backend.holders(pin)) < pin.replicas:
        body = {"model": pin.model, "messages": list(pin.content.messages), "max_tokens": 1, "temperature": 0}
        if pin.content.tools:
            body["tools"] = list(pin.content.tools)
        try:
            await backend.complete(pin.owner, body)
        except MoonpoolError as e:
            backend.pins.failed(pin.id, str(e), backend.now())
            return
    seen(backend, pin)


def seen(backend: CachingBackend, pin: Pin) -> Pin:
    """The pin with the state that the index gives it now."""
    if not pin.alive:
        return pin
    return backend.pins.observe(pin.id, len(backend.holders(pin)), backend.now()) or pin
