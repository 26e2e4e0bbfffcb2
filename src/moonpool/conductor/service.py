"""The live conductor: registry, one scheduler for each model, and who keeps them true. Everything runs on one event loop.

What the HTTP routes call is here; what decides is in the pure core.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from moonpool.conductor import admission, executors, policies
from moonpool.conductor.cluster import Cluster, Member
from moonpool.conductor.config import ConductorConfig, ModelOptions
from moonpool.conductor.coupled import Coupled
from moonpool.conductor.events.ingest import Feed
from moonpool.conductor.events.translate import Translator
from moonpool.conductor.executors import Executor
from moonpool.conductor.index import PrefixIndex
from moonpool.conductor.ledger import Ledger
from moonpool.conductor.prompts import PromptReader, TextReader, TokenReader
from moonpool.conductor.registry import Instance, InstanceEntry, Registry
from moonpool.conductor.scheduler import Booked, Decision, Scheduler
from moonpool.conductor.types import InstanceId, Plan, Refusal, Request
from moonpool.conductor.upstream import Upstream, UpstreamError

log = logging.getLogger(__name__)
Clock = Callable[[], float]
_REFRESH_S = 0.25
"""Breakers that close by time alone are seen this late."""


class _Model:
    """All that belongs to one model's name."""

    def __init__(self, name: str, options: ModelOptions, config: ConductorConfig, rng: random.Random) -> None:
        self.options = options
        ledger = Ledger(rng)
        index = PrefixIndex(rng, max_bytes=config.index_bytes, guess_s=config.guess_s)
        self.cluster = Cluster(index, ledger, rng)
        self.residence = admission.Residence()
        gate = admission.named(config.admission.gate, config.admission.test, self.cluster, self.residence)
        policy = Coupled(policies.named(config.policy, rng, **config.options), self.cluster)
        self.scheduler = Scheduler(self.cluster, policy, gate)
        self.executor: Executor = executors.named(options.executor)
        folder = options.tokenizer
        self.reader: PromptReader = TokenReader(name, Path(folder), options.block_size) if folder else TextReader(name)


class Conductor:
    def __init__(self, config: ConductorConfig, clock: Clock = time.monotonic) -> None:
        """Raises ConfigError: a tokenizer that cannot be read, an instance or policy that is none."""
        config.check()
        self.config, self.clock = config, clock
        self._rng = random.Random(config.seed or None)
        self.registry = Registry(config.breaker, config.health.dead_after)
        self.models: dict[str, _Model] = {}
        self.outcomes = Counter[str]()
        self.ttfts: list[tuple[str, float]] = []
        self.cached_tokens = self.converted_tokens = self.prompt_tokens = 0
        self.saved_prefill_s = 0.0
        self._refreshed = float("-inf")
        self._upstream: Upstream | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.feeds: dict[InstanceId, Feed] = {}
        """KV events of the instances that publish some."""
        self._closing = set[asyncio.Task[None]]()
        for entry in config.instances:
            self.add(entry)

    # -- what runs beside the requests

    async def start(self) -> None:
        self._upstream = Upstream(self.config.timeouts)
        self._tasks = [asyncio.create_task(self._probe()), asyncio.create_task(self._sweep())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._closing, return_exceptions=True)
        await asyncio.gather(*(f.close() for f in self.feeds.values()))
        self.feeds.clear()
        if self._upstream:
            await self._upstream.close()

    @property
    def upstream(self) -> Upstream:
        assert self._upstream is not None, "not started"
        return self._upstream

    async def _probe(self) -> None:
        """Health of all instances, all at once, again and again."""
        while True:
            await asyncio.gather(*(self.probe(i) for i in self.registry))
            self._refresh()
            await asyncio.sleep(self.config.health.every_s)

    async def probe(self, instance: Instance) -> None:
        health = self.config.health
        try:
            status, _ = await self.upstream.get(f"{instance.entry.url.rstrip('/')}{health.path}", health.timeout_s)
            healthy, why = status == 200, f"{health.path} answered {status}"
        except UpstreamError as e:
            healthy, why = False, str(e)
        change = self.registry.probed(instance.id, healthy, why)
        if change and change[0] != change[1]:
            self._follow(instance)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = self.clock()
            for model in self.models.values():
                self.outcomes["overdue"] += len(model.scheduler.cluster.ledger.sweep(now))
            for gone in self.registry.sweep():
                self._leave(gone)

    def _refresh(self) -> None:
        """Breakers and penalties into the members."""
        now = self._refreshed = self.clock()
        for instance in self.registry:
            member = self.model(instance.entry.model).cluster.members.get(instance.id)
            if member is not None:
                member.open = instance.state == "ready" and instance.breaker.admits(now)
                member.penalty_s = instance.breaker.penalty_s(now)

    # -- instances

    def add(self, entry: InstanceEntry) -> bool:
        """False if it is there already, unchanged. Raises ConfigError."""
        if not self.registry.add(entry, self.clock()):
            return False
        self._leave(entry.name)
        return True

    def remove(self, instance: InstanceId) -> bool:
        self._leave(instance)
        return self.registry.remove(instance)

    def drain(self, instance: InstanceId) -> bool:
        found = self.registry.drain(instance)
        self._refresh()
        return found

    def _follow(self, instance: Instance) -> None:
        """A ready instance joins its cluster; one that is not leaves candidates and index at once."""
        if instance.state != "ready":
            return self._leave(instance.id)
        entry, model = instance.entry, self.model(instance.entry.model)
        member = Member(
            instance.id,
            "prefill" in entry.roles,
            "decode" in entry.roles,
            model.options.perf,
            capacity_tokens=entry.decode_tokens,
            guesses=not entry.events,
        )
        blocks = entry.cache_tokens // model.options.block_size
        model.cluster.join(member, self.clock(), cache_blocks=blocks)
        if entry.events and instance.id not in self.feeds:
            size = entry.block_size or model.options.block_size
            translator = Translator(instance.id, model.cluster.index, entry.model, model.options.block_size)
            if size != model.options.block_size:
                log.warning(
                    "%s: blocks of %d tokens, the conductor's have %d", instance.id, size, model.options.block_size
                )
            self.feeds[instance.id] = feed = Feed(instance.id, entry.events, entry.replay, translator, self.clock)
            feed.start()
        return None

    def _leave(self, instance: InstanceId) -> None:
        for model in self.models.values():
            model.cluster.leave(instance)
        feed = self.feeds.pop(instance, None)
        if feed is not None:
            closing = asyncio.get_running_loop().create_task(feed.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def model(self, name: str) -> _Model:
        found = self.models.get(name)
        if found is None:
            options = self.config.models.get(name, ModelOptions())
            found = self.models[name] = _Model(name, options, self.config, self._rng)
        return found

    # -- what the front asks

    def reader(self, model: str) -> PromptReader:
        return self.model(model).reader

    def executor(self, model: str) -> Executor:
        return self.model(model).executor

    def decide(self, request: Request, now: float) -> Booked | Refusal:
        if now >= self._refreshed + _REFRESH_S:
            self._refresh()
        found = self.model(request.model).scheduler.decide(request, now)
        if isinstance(found, Refusal):
            self.outcomes[f"refused_{found.stage}"] += 1
        elif found.plan.own_tokens and (feed := self.feeds.get(found.plan.prefill)) is not None:
            feed.hits += 1
        return found

    def ended(self, request: Request, plan: Plan, outcome: str, ttft: float, total: float) -> None:
        """Figures of a request that is over."""
        self.outcomes[outcome] += 1
        if outcome != "ok":
            self._refresh()  # a breaker may have opened: the next decision must know
            return
        model = self.model(request.model)
        self.ttfts = [*self.ttfts[-4999:], (request.model, ttft)]
        self.prompt_tokens += request.tokens
        self.cached_tokens += plan.cached_tokens
        self.converted_tokens += plan.converted_tokens
        if (member := model.cluster.members.get(plan.prefill)) is not None:
            saved = member.perf.prefill_s(request.tokens, 0) - member.perf.prefill_s(request.tokens, plan.cached_tokens)
            self.saved_prefill_s += saved * member.correction.factor
        model.residence.ended(max(0.0, total - ttft))

    def decisions(self, id_: str = "", last: int = 100) -> list[Decision]:
        """The newest last."""
        found = [d for m in self.models.values() for d in m.scheduler.log if not id_ or d.id == id_]
        return sorted(found, key=lambda d: d.at)[-last:]
