"""An index without scheduling: who holds how much of these tokens? What Mooncake's conductor answers to its clients.

Engines are registered by their event addresses alone; nothing is sent to them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

import msgspec

from moonpool.conductor.chain import Context, TokenChain
from moonpool.conductor.events.ingest import Feed
from moonpool.conductor.events.translate import Translator
from moonpool.conductor.index import PrefixIndex
from moonpool.errors import RequestError

_Tiers = Callable[["Service"], tuple[int, int, int]]
MAX_SERVICES = 10_000


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's rank, as `/register` names it."""

    endpoint: str
    """ZMQ address of its KV events."""
    replay_endpoint: str = ""
    type: str = "vLLM"
    modelname: str
    lora_name: str = ""
    tenant_id: str = "default"
    instance_id: str
    block_size: int
    dp_rank: int = 0
    additionalsalt: str = ""

    @property
    def key(self) -> str:
        return f"{self.instance_id}|{self.tenant_id}|{self.dp_rank}"


class Query(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    lora_name: str = ""
    token_ids: list[int] = []
    seq_hashes: list[int] = msgspec.field(default_factory=list)
    block_hash: list[int] = msgspec.field(default_factory=list)
    """Alias of `seq_hashes`."""
    tenant_id: str = "default"
    instance_id: str = ""
    block_size: int = 0
    cache_salt: str = ""


class Matched(msgspec.Struct, kw_only=True):
    """Tokens, whole blocks only; tiers are cumulative."""

    longest_matched: int = 0
    GPU: int = 0
    DP: dict[str, int] = msgspec.field(default_factory=dict)
    CPU: int = 0
    DISK: int = 0


class Indexer:
    """Lives on one event loop."""

    def __init__(self) -> None:
        self._index = PrefixIndex(random.Random())
        self._services: dict[str, Service] = {}
        self._feeds: dict[str, Feed] = {}
        self._closing = set[asyncio.Task[None]]()

    def register(self, service: Service) -> bool:
        """False if it is there already, unchanged. Raises RequestError."""
        if service.block_size < 1:
            raise RequestError("block_size must be positive", key="block_size", have=str(service.block_size))
        if not service.endpoint.startswith(("tcp://", "ipc://")):
            raise RequestError("not a ZMQ address", key="endpoint", need="tcp://host:port", have=service.endpoint)
        if self._services.get(service.key) == service:
            return False
        if len(self._services) >= MAX_SERVICES:
            raise RequestError("too many services", need=f"<= {MAX_SERVICES}")
        self.unregister(service.key)
        self._services[service.key] = service
        self._index.register(service.key)
        translator = Translator(service.key, self._index, service.modelname, service.block_size, service.tenant_id)
        feed = Feed(service.key, service.endpoint, service.replay_endpoint, translator, time.monotonic)
        self._feeds[service.key] = feed
        feed.start()
        return True

    def unregister(self, key: str) -> bool:
        service = self._services.pop(key, None)
        if service is None:
            return False
        self._index.unregister(key)
        closing = asyncio.get_running_loop().create_task(self._feeds.pop(key).close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return True

    async def close(self) -> None:
        for key in list(self._services):
            self.unregister(key)
        await asyncio.gather(*self._closing)

    def services(self) -> list[dict[str, object]]:
        found = []
        for key, service in self._services.items():
            ranks = self._feeds[key].sources
            state = next((s.state for s in ranks.values()), "cold")
            found.append({**msgspec.to_builtins(service), "state": state, "blocks": self._feeds[key].translator.stored})
        return found

    def keys(self, instance: str, tenant: str, rank: int | None) -> list[str]:
        """Services of an instance; of all its ranks where none is named."""
        return [
            k
            for k, s in self._services.items()
            if s.instance_id == instance and s.tenant_id == tenant and rank in (None, s.dp_rank)
        ]

    def query(self, q: Query) -> dict[str, dict[str, Matched]]:
        """Tenant → instance → what it holds of these tokens."""
        chains: dict[int, TokenChain] = {}

        def tiers(service: Service) -> tuple[int, int, int]:
            size = service.block_size
            if size not in chains:
                salt = q.cache_salt
                chains[size] = TokenChain(q.token_ids, Context(q.tenant_id, q.model, q.lora_name, size, salt))
            return self._index.tiers(chains[size], service.key)

        return self._matched(q, tiers)

    def query_by_hash(self, q: Query) -> dict[str, dict[str, Matched]]:
        """The same for an engine's own hashes, as its events named them."""
        hashes = q.seq_hashes or q.block_hash

        def tiers(service: Service) -> tuple[int, int, int]:
            return self._feeds[service.key].translator.tiers(hashes)

        return self._matched(q, tiers)

    def _matched(self, q: Query, tiers: _Tiers) -> dict[str, dict[str, Matched]]:
        found: dict[str, Matched] = {}
        for service in self._asked(q):
            gpu, cpu, disk = (blocks * service.block_size for blocks in tiers(service))
            one = found.setdefault(service.instance_id, Matched())
            one.longest_matched = max(one.longest_matched, disk)
            one.GPU, one.CPU, one.DISK = max(one.GPU, gpu), max(one.CPU, cpu), max(one.DISK, disk)
            one.DP[str(service.dp_rank)] = gpu
        return {q.tenant_id: found}

    def _asked(self, q: Query) -> Sequence[Service]:
        return [
            s
            for s in self._services.values()
            if s.modelname == q.model
            and s.tenant_id == q.tenant_id
            and s.lora_name in ("", q.lora_name)
            and (not q.instance_id or s.instance_id == q.instance_id)
            and (not q.block_size or s.block_size == q.block_size)
        ]
