"""How a plan becomes calls to engines: one small object for each way that engines hand KV over."""

from __future__ import annotations

from moonpool.conductor.executors.base import Call, Executor
from moonpool.conductor.executors.mooncake import MooncakeExecutor
from moonpool.conductor.executors.nixl import NixlExecutor
from moonpool.conductor.executors.plain import PlainExecutor
from moonpool.conductor.executors.sglang import SGLangExecutor
from moonpool.conductor.executors.store import MoonpoolExecutor, StoreExecutor
from moonpool.errors import ConfigError

__all__ = ["Call", "Executor", "named"]

_EXECUTORS: dict[str, type[Executor]] = {
    "plain": PlainExecutor,
    "store": StoreExecutor,
    "moonpool": MoonpoolExecutor,
    "nixl": NixlExecutor,
    "mooncake": MooncakeExecutor,
    "sglang": SGLangExecutor,
}


def named(name: str) -> Executor:
    """Raises ConfigError."""
    if name not in _EXECUTORS:
        raise ConfigError("no such executor", key=name, need=", ".join(_EXECUTORS))
    return _EXECUTORS[name]()
