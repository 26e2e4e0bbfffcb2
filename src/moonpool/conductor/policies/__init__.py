"""Policies behind one interface (`types.Policy`). The default is `kvcache`; the others are there to be compared with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from moonpool.conductor.policies.kvcache import KVCacheOptions, KVCachePolicy
from moonpool.conductor.policies.published import Dynamo, LlmD, Preble, SGLangCacheAware
from moonpool.conductor.policies.simple import LeastRequests, LeastWork, PowerOfTwo, RandomPolicy, RoundRobin, Session
from moonpool.conductor.types import Policy, Random
from moonpool.errors import ConfigError

__all__ = ["NAMES", "named"]


def _kvcache(random: Random, **options: Any) -> Policy:
    return KVCachePolicy(random, _options(options))


def _local(random: Random, **options: Any) -> Policy:
    return KVCachePolicy(random, _options({**options, "transfers": False}))


def _options(options: dict[str, Any]) -> KVCacheOptions:
    try:
        return msgspec.convert(options, KVCacheOptions)
    except msgspec.ValidationError as e:
        raise ConfigError(f"policy options: {e}", need=", ".join(KVCacheOptions.__struct_fields__)) from e


_PLAIN: tuple[type[Any], ...] = (
    *(RandomPolicy, RoundRobin, LeastRequests, LeastWork, PowerOfTwo, Session),
    *(Dynamo, SGLangCacheAware, Preble, LlmD),
)
_POLICIES: dict[str, Callable[..., Policy]] = {"kvcache": _kvcache, "local": _local, **{c.name: c for c in _PLAIN}}
NAMES = tuple(_POLICIES)


def named(name: str, random: Random, **options: Any) -> Policy:
    """Raises ConfigError: no such policy, or options that it does not have."""
    if name not in _POLICIES:
        raise ConfigError("no such policy", key=name, need=", ".join(NAMES))
    try:
        return _POLICIES[name](random, **options)
    except TypeError as e:
        raise ConfigError(f"policy options: {e}", key=name) from e
