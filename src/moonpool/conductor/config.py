"""The conductor's file: `moonpool conductor FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from moonpool import config
from moonpool.conductor import admission, policies
from moonpool.conductor.breaker import BreakerOptions
from moonpool.conductor.ledger import Lease
from moonpool.conductor.perf import PerfModel
from moonpool.conductor.registry import InstanceEntry
from moonpool.conductor.types import SLO
from moonpool.conductor.upstream import Timeouts
from moonpool.errors import ConfigError


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one model name. A model without an entry gets the defaults."""

    tokenizer: str = ""
    """Folder with tokenizer.json (and the chat template); empty: prompts are cut by characters."""
    block_size: int = 16
    """Tokens of a block; the engines' own, where they send events."""
    executor: str = "plain"
    """How KV goes from a prefill to a decode instance: plain, store, moonpool, nixl, mooncake, sglang."""
    perf: PerfModel = PerfModel(prefill=(0.02, 1e-4, 0.0), decode=(0.02, 1e-3, 0.0))
    """Start values; each instance is corrected by what it takes."""


class AdmissionOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gate: Literal["off", "soft", "hard"] = "off"
    test: Literal["baseline", "early", "predict"] = "predict"


class HealthOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str = "/health"
    every_s: float = 2.0
    timeout_s: float = 5.0
    dead_after: int = 3
    """Failed probes in a row."""


class ConductorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    instances: list[InstanceEntry] = []
    models: dict[str, ModelOptions] = {}
    policy: str = "kvcache"
    options: dict[str, float | bool | int] = {}
    """Of the policy."""
    admission: AdmissionOptions = AdmissionOptions()
    slo: SLO = SLO()
    health: HealthOptions = HealthOptions()
    breaker: BreakerOptions = BreakerOptions()
    timeouts: Timeouts = Timeouts()
    retries: int = 2
    keep_alive_s: float = 0.0
    index_bytes: int = 1 << 30
    guess_s: float = 120.0
    """How long a prompt that was sent somewhere counts as cached there, where no events tell."""
    seed: int = 0
    """Of ties and exploration; 0 = another one each time."""

    def check(self) -> None:
        """Raises ConfigError."""
        import random

        from moonpool.conductor import executors

        policies.named(self.policy, random.Random(), **self.options)
        for model, options in self.models.items():
            executors.named(options.executor)
            if options.block_size < 1:
                raise ConfigError("block_size must be at least 1", key=model, have=str(options.block_size))
        for entry in self.instances:
            entry.check()
        names = [i.name for i in self.instances]
        if double := {n for n in names if names.count(n) > 1}:
            raise ConfigError("two instances of one name", key=sorted(double)[0], fix="Give them `id`s.")
        admission.named(self.admission.gate, self.admission.test, _NoSets())


class _NoSets:
    def decoding(self, instance: str) -> list[Lease]:
        return []

    def step_s(self, instance: str, batch: int, context: int) -> float:
        return 0.0


def load(path: str | Path) -> ConductorConfig:
    """Raises ConfigError."""
    found = config.load(path, ConductorConfig)
    found.check()
    return found
