"""The projector interface: a source model's KV of some tokens → the target model's KV of the same tokens.

A projector is position-free arithmetic. Un-rotating the source's keys and rotating the target's is the converter's job
(`c2c.convert`), according to `key_space`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, Self

from torch import Tensor


class Projector(ABC):
    """Maps `[tokens, source layers, source width]` to `[tokens, target layers, target width]`; width = KV heads × head_dim.

    Immutable after construction and safe to call from several threads.
    """

    kind: ClassVar[str]
    """Name in the manifest."""

    key_space: Literal["content", "rotated"]
    """`content`: keys come un-rotated and are rotated by the target's RoPE afterwards. `rotated`: keys as stored, both
    sides (issue #1520's recipe)."""

    @abstractmethod
    def project(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """`k`, `v`: fp32 `[N, Ls, Hs*Ds]`. Returns fp32 `[N, Lt, Ht*Dt]` each. Never writes to its inputs."""

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """What the manifest must hold to build this projector again, as plain JSON values."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Weights by name, as stored in the bundle's safetensors file."""

    @classmethod
    @abstractmethod
    def build(cls, parameters: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        """Inverse of `parameters` and `tensors`. Raises BundleCorrupt on wrong names, shapes, NaN or Inf."""
