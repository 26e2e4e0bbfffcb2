"""`ReplicateConfig`: how to store, in the peer's words, and its translation into `PutOptions`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from moonpool.errors import ConfigError
from moonpool.types import Pin, PutOptions

_DEFAULT_SOFT_PIN_S = 1800.0


class SoftPinAction(IntEnum):
    PRESERVE = 0
    """A new object gets no soft pin, an upserted one keeps what it has."""
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(IntEnum):
    """What the bytes are, for the peer's statistics. Moonpool stores bytes."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


@dataclass(slots=True)
class ReplicateConfig:
    """Mutable, as its users set field after field. `options` refuses what does not fit together.

    `preferred_segment` and `preferred_segments` name segments by `get_hostname()`. `group_ids`: one for each key, "" = none.
    """

    replica_num: int = 1
    soft_pin_action: SoftPinAction = SoftPinAction.PRESERVE
    soft_pin_ttl_ms: int | None = None
    with_hard_pin: bool = False
    preferred_segment: str = ""
    preferred_segments: list[str] = field(default_factory=list)
    prefer_alloc_in_same_node: bool = False
    data_type: ObjectDataType = ObjectDataType.UNKNOWN
    group_ids: list[str] | None = None
    nof_replica_num: int = 0
    preferred_nof_segments: list[str] = field(default_factory=list)
    dfs_replica_num: int = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "soft_pin_ttl_ms" and value is not None:
            value = operator.index(value)
            if not 0 <= value < 1 << 64:
                raise TypeError(f"soft_pin_ttl_ms must be None or 0 to 2**64 - 1, not {value}")
        object.__setattr__(self, name, value)

    def options(self, keys: int, *, home: str = "", replace: bool = False, kept: Pin = Pin.NONE) -> PutOptions:
        """For a call with so many keys. `home` is this store's own segment; `kept` the pin of the object that an upsert
        replaces. Raises ConfigError."""
        if self.nof_replica_num or self.dfs_replica_num:
            raise ConfigError("NoF and DFS replicas are not supported", key="replica_num", fix="Use `replica_num`.")
        if self.replica_num < 1:
            raise ConfigError("no replica asked for", key="replica_num", need=">= 1", have=str(self.replica_num))
        if self.soft_pin_ttl_ms is not None and self.soft_pin_action is not SoftPinAction.ENABLE:
            raise ConfigError("a time without a pin", key="soft_pin_ttl_ms", need="soft_pin_action = ENABLE")
        if self.group_ids is not None and len(self.group_ids) != keys:
            raise ConfigError("one group for each key", key="group_ids", need=str(keys), have=str(len(self.group_ids)))
        ttl_ms = self.soft_pin_ttl_ms
        return PutOptions(
            replicas=self.replica_num,
            strict_replicas=False,
            preferred=self._preferred(home),
            pin=self._pin(kept),
            soft_pin_ttl_s=_DEFAULT_SOFT_PIN_S if ttl_ms is None else ttl_ms / 1000,
            groups=tuple(self.group_ids or ()),
            replace=replace,
        )

    def _preferred(self, home: str) -> tuple[str, ...]:
        named: Sequence[str] = [self.preferred_segment] if self.preferred_segment else self.preferred_segments
        return tuple(named) or ((home,) if self.prefer_alloc_in_same_node and home else ())

    def _pin(self, kept: Pin) -> Pin:
        if self.with_hard_pin:
            return Pin.HARD
        if self.soft_pin_action is SoftPinAction.ENABLE:
            return Pin.SOFT
        return kept if self.soft_pin_action is SoftPinAction.PRESERVE else Pin.NONE

    def __str__(self) -> str:
        ttl = "default" if self.soft_pin_ttl_ms is None else self.soft_pin_ttl_ms
        return (
            f"ReplicateConfig: {{ replica_num: {self.replica_num}, nof_replica_num: {self.nof_replica_num}, "
            f"dfs_replica_num: {self.dfs_replica_num}, soft_pin_action: {SoftPinAction(self.soft_pin_action).name}, "
            f"soft_pin_ttl_ms: {ttl}, with_hard_pin: {int(self.with_hard_pin)}, preferred_segments: "
            f"{[self.preferred_segment] if self.preferred_segment else self.preferred_segments}, "
            f"prefer_alloc_in_same_node: {int(self.prefer_alloc_in_same_node)}, "
            f"data_type: {ObjectDataType(self.data_type).name} }}"
        )
