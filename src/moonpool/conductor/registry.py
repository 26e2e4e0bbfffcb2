"""The instances that the conductor sends requests to: a pure state machine. `health` feeds it, the server asks it.

starting ──ready──► ready ──drain──► draining ──idle──► removed
    ▲                 │
    └── dead ◄── `dead_after` failed probes ──┘          a dead instance comes back when a probe succeeds
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from moonpool.conductor.breaker import Breaker, BreakerOptions
from moonpool.conductor.types import InstanceId, Role
from moonpool.errors import ConfigError

Kind = Literal["moonpool", "vllm", "sglang", "openai"]
State = Literal["starting", "ready", "draining", "dead"]
ROLES: tuple[Role, ...] = ("prefill", "decode")


class InstanceEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine, as the file, `/instances` or an engine's own registration names it."""

    url: str
    """`http://host:port`."""
    model: str
    """Name that clients ask for."""
    id: str = ""
    """Empty: the URL's host and port."""
    roles: tuple[Role, ...] = ROLES
    kind: Kind = "openai"
    events: str = ""
    """ZMQ address of its KV events; empty: what the conductor sends there is taken for what it holds."""
    replay: str = ""
    """ZMQ address that lost events are asked again at."""
    block_size: int = 0
    """Of its events; 0 = the conductor's."""
    cache_tokens: int = 0
    """Capacity of its cache, where no events tell it; 0 = unknown."""
    decode_tokens: int = 0
    """KV tokens that its batch may hold; 0 = no limit known."""
    bootstrap: str = ""
    """`host:port` of a P/D bootstrap server, for executors that need one."""
    group: str = ""
    """Only instances of one group pair for prefill and decode: other versions, dtypes or layouts are other groups."""
    canary: bool = False
    """Ready only after a one-token request went through."""

    @property
    def name(self) -> InstanceId:
        return self.id or self.url.split("://", 1)[-1].rstrip("/")

    def check(self) -> None:
        """Raises ConfigError."""
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError("not an instance's URL", key=self.name, need="http://host:port", have=self.url)
        if not self.roles or not set(self.roles) <= set(ROLES):
            raise ConfigError("bad roles", key=self.name, need="prefill, decode or both", have=str(list(self.roles)))


class Instance:
    """One instance and what is known of its health."""

    def __init__(self, entry: InstanceEntry, now: float, options: BreakerOptions) -> None:
        self.entry, self.joined = entry, now
        self.breaker = Breaker(options)
        self.state: State = "starting"
        self.failed_probes = 0
        self.in_flight = 0
        """Requests that run through this conductor; the ledger has their cost."""
        self.why = ""
        """Of its state, for people."""

    @property
    def id(self) -> InstanceId:
        return self.entry.name

    def takes(self, role: Role, now: float) -> bool:
        return self.state == "ready" and role in self.entry.roles and self.breaker.admits(now)


class Registry:
    def __init__(self, breaker: BreakerOptions = BreakerOptions(), dead_after: int = 3) -> None:
        """`dead_after`: failed probes in a row. Life on a running answer counts as a good probe."""
        self._breaker, self._dead_after = breaker, dead_after
        self._all: dict[InstanceId, Instance] = {}

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)

    def get(self, id_: InstanceId) -> Instance | None:
        return self._all.get(id_)

    def add(self, entry: InstanceEntry, now: float) -> bool:
        """False if it is there already, unchanged; a changed entry begins anew. Raises ConfigError."""
        entry.check()
        known = self._all.get(entry.name)
        if known is not None and known.entry == entry and known.state != "draining":
            return False
        self._all[entry.name] = Instance(entry, now, self._breaker)
        return True

    def remove(self, id_: InstanceId) -> bool:
        return self._all.pop(id_, None) is not None

    def drain(self, id_: InstanceId) -> bool:
        """No new requests; `sweep` removes it when the last has ended. False: no such instance."""
        instance = self._all.get(id_)
        if instance is None:
            return False
        instance.state, instance.why = "draining", "drained by request"
        return True

    def sweep(self) -> list[InstanceId]:
        """Removes drained instances that are idle, and names them."""
        idle = [i.id for i in self._all.values() if i.state == "draining" and not i.in_flight]
        for id_ in idle:
            del self._all[id_]
        return idle

    def probed(self, id_: InstanceId, healthy: bool, why: str = "") -> tuple[State, State] | None:
        """A health probe's result → (state before, state now), None for an unknown instance."""
        instance = self._all.get(id_)
        if instance is None:
            return None
        before = instance.state
        if healthy:
            instance.failed_probes = 0
            if before in ("starting", "dead"):
                instance.state, instance.why = "ready", ""
        else:
            instance.failed_probes += 1
            instance.why = why
            if instance.failed_probes >= self._dead_after and before == "ready":
                instance.state = "dead"
        return before, instance.state

    def alive(self, id_: InstanceId) -> None:
        """Bytes arrived from it: busy is not dead."""
        instance = self._all.get(id_)
        if instance is not None:
            instance.failed_probes = 0

    def models(self) -> list[str]:
        """Of instances that take requests; the dead ones' are left out."""
        return sorted({i.entry.model for i in self._all.values() if i.state == "ready"})

    def of(self, model: str, role: Role, now: float) -> list[Instance]:
        return [i for i in self._all.values() if i.entry.model == model and i.takes(role, now)]
