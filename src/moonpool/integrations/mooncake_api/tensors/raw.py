"""What the tensor calls need of the store, and raw memory at its border."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from moonpool.integrations.mooncake_api.buffers import BufferHandle
from moonpool.integrations.mooncake_api.codes import Code
from moonpool.integrations.mooncake_api.memory import view_at
from moonpool.integrations.mooncake_api.quiet import Quiet
from moonpool.integrations.mooncake_api.tensors.header import Bytes
from moonpool.types import BufferLike

INVALID = int(Code.INVALID_PARAMS)
_quiet = Quiet(logging.getLogger(__name__))

Config: TypeAlias = Any
"""A ReplicateConfig, or None for the store's default."""


class RawStore(Protocol):
    """The raw calls of the store (the peer's): 0 or bytes for success, else a negative code; they never raise but TypeError."""

    def upsert_parts(self, key: str, *parts: BufferLike, config: Config = ...) -> int: ...

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: Config = ...,
    ) -> list[int]: ...

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]: ...

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]: ...


class Piece(NamedTuple):
    """One object to write: its parts, one after the other. The arrays keep the memory alive."""

    key: str
    parts: tuple[Bytes, ...]


def write(store: RawStore, pieces: Sequence[Piece], config: Config, *, replace: bool) -> list[int]:
    """Writes all in one call where the store has one; a code for each. No part is copied on the way to the store."""
    if not pieces:
        return []
    extra = {} if config is None else {"config": config}
    if replace:
        return [store.upsert_parts(p.key, *(part.data for part in p.parts), **extra) for p in pieces]
    addresses = [[int(part.ctypes.data) for part in p.parts] for p in pieces]
    sizes = [[len(part) for part in p.parts] for p in pieces]
    codes = store.batch_put_from_multi_buffers([p.key for p in pieces], addresses, sizes, **extra)
    return codes if len(codes) == len(pieces) else [INVALID] * len(pieces)


def fetch(store: RawStore, keys: Sequence[str]) -> list[Bytes | None]:
    """Each object's bytes, None where it is missing."""
    handles: Sequence[BufferHandle | None] = store.batch_get_buffer(keys) if keys else []
    if len(handles) != len(keys):  # a store that is not set up
        return [None] * len(keys)
    return [None if h is None else h.view(np.ndarray) for h in handles]


def memory_at(address: int, size: int) -> Bytes:
    """The caller's memory, not a copy. That it is there is the caller's word, as in the peer's API."""
    return np.frombuffer(view_at(address, size, writable=True), np.uint8) if size else np.empty(0, np.uint8)


def for_some(config: Config, indices: Sequence[int]) -> Config:
    """The config for these keys of a batch, each with its own group if there are groups; an index may come several times."""
    groups = getattr(config, "group_ids", None)
    if groups is None:
        return config
    chosen = copy.copy(config)
    chosen.group_ids = [groups[i] for i in indices]
    return chosen


def config_fits(config: Config, count: int) -> bool:
    """Whether a config is good for `count` keys: the peer refuses another number of groups, or of preferred segments."""
    groups = getattr(config, "group_ids", None)
    segments = getattr(config, "preferred_segments", None)
    if groups is not None and len(groups) != count:
        return refuse(f"{len(groups)} group_ids for {count} keys") == 0
    if segments and len(segments) != getattr(config, "replica_num", 1):
        return refuse(f"{len(segments)} preferred_segments for {config.replica_num} replicas") == 0
    return True


def refuse(why: str, key: str = "") -> int:
    """The peer's code for a request that is none; the log has the reason."""
    _quiet.warning(why, "%s%s", f"{key}: " if key else "", why)
    return INVALID


def check_key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a key must be str, not {type(key).__name__}")
    return key


def check_keys(keys: object) -> list[str]:
    if isinstance(keys, str | bytes) or not isinstance(keys, Sequence):
        raise TypeError(f"keys must be a list of str, not {type(keys).__name__}")
    return [check_key(k) for k in keys]


def check_list(values: object, name: str) -> list[Any]:
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name} must be a list, not {type(values).__name__}")
    return list(values)


def check_int(value: object, name: str) -> int:
    """An address or a size."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise TypeError(f"{name} must be an integer in [0, 2^63), not {value!r}")
    return value


def check_ints(values: object, name: str) -> list[int]:
    return [check_int(v, name) for v in check_list(values, name)]


def check_rank(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -(1 << 31) <= value < 1 << 31:
        raise TypeError(f"{name} must be a 32-bit integer, not {value!r}")
    return value
