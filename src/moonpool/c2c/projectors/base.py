"""The projector interface: a source model's KV of some tokens → the target model's KV of the same tokens.

    x  fp32 [N, source layers, 2, source width]      2 = K, V; width = KV heads × head_dim
    y  fp32 [N, target layers, 2, target width]

K and V of one token in one layer lie side by side, so that `x[:, layer]` is one strided matrix: a projector multiplies it where
it lies, without gathering. The other strides are free; the converter keeps one token's layers together, as pages do, so that all
layers are one matrix too.

A projector is position-free arithmetic. Taking the source's rotation off the keys and putting the target's on is the
converter's job (`c2c.convert`), according to `key_space`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from moonpool.errors import BundleCorrupt

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

KeySpace = Literal["content", "rotated", "invariant"]
"""How keys come and go. `content`: un-rotated before, rotated after. `rotated`: as stored, both sides (issue #1520's recipe).
`invariant`: the projector leaves content as it is, so keys are turned once, by the difference of the two rotations."""


class Stored(ABC):
    """What a bundle can hold: arithmetic that is built from a manifest's parameters and a file of weights.

    Immutable after construction and safe to call from several threads.
    """

    kind: ClassVar[str]
    """Name in the manifest."""
    page_size: int = 0
    """Tokens of a page where a token's result hangs on others of its page: rows then come in whole pages, one behind the other, and
    the bundle serves this page size alone. 0: each token by itself."""

    @abstractmethod
    def flops_per_token(self) -> int:
        """Floating-point operations of the matrix products for one token, both halves."""

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """What the manifest must hold to build this again, as plain JSON values."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Weights by name, as stored in the bundle's safetensors file."""

    @classmethod
    @abstractmethod
    def build(cls, parameters: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Inverse of `parameters` and `tensors`. Raises BundleCorrupt on wrong names, shapes, NaN or Inf."""


class Projector(Stored):
    """Makes the target's KV from the source's alone, so that the target need not prefill."""

    key_space: KeySpace

    source_shape: tuple[int, int]
    """(layers, width) that `project` takes."""
    target_shape: tuple[int, int]
    """(layers, width) that `project` gives."""
    target_head_dim: int = 0
    """The target's head_dim where the projector treats heads apart, else 0."""

    @abstractmethod
    def source_layers(self) -> list[int]:
        """Source layers that are read at all, ascending; the converter prepares only these."""

    @abstractmethod
    def project(self, x: Tensor) -> Tensor:
        """`x` → `y` (shapes above). Layers that are not in `source_layers` may hold anything. Never writes to `x`."""

    def shapes(self) -> list[tuple[int, int]]:
        """(rows, columns) of the matrix products, for measuring the machine's own rate on these shapes: the definition's
        products, whatever `project` cuts them into."""
        weights = [w for name, w in self.tensors().items() if name.endswith("weight")]
        return [(w.shape[-2], w.shape[-1]) for w in weights for _ in range(w.shape[:-2].numel())]


def take(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """The named weight in fp32, checked: it is there, has this shape and only finite numbers."""
    if name not in tensors:
        raise BundleCorrupt("weight is missing", key=name, need=str(list(shape)), have=", ".join(sorted(tensors)[:8]))
    tensor = tensors[name]
    if tensor.dtype not in _FLOATS:
        raise BundleCorrupt("weight of the wrong type", key=name, need="bf16, fp16 or fp32", have=str(tensor.dtype))
    if tuple(tensor.shape) != shape:
        raise BundleCorrupt("weight of the wrong shape", key=name, need=str(list(shape)), have=str(list(tensor.shape)))
    if not bool(torch.isfinite(tensor).all()):
        raise BundleCorrupt("weight has NaN or Inf", key=name, fix="Fit or download the bundle again.")
    return tensor.to(torch.float32).contiguous()
