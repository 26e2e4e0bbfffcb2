"""`identity`: the target's KV content is the source's. For models whose KV is the same by construction, and for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import msgspec
from torch import Tensor

from moonpool.c2c.projectors.base import Projector
from moonpool.c2c.projectors.linear import positive, typed


class IdentityParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    layers: int
    width: int


class IdentityProjector(Projector):
    kind: ClassVar[str] = "identity"
    key_space = "invariant"

    def __init__(self, parameters: IdentityParameters) -> None:
        self._p = parameters
        self.source_shape = self.target_shape = (parameters.layers, parameters.width)

    def source_layers(self) -> list[int]:
        return list(range(self._p.layers))

    def project(self, x: Tensor) -> Tensor:
        return x.clone()

    def flops_per_token(self) -> int:
        return 0

    def parameters(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(self._p))

    def tensors(self) -> dict[str, Tensor]:
        return {}

    @classmethod
    def build(cls, parameters: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        p: IdentityParameters = typed(parameters, IdentityParameters)
        positive(p, "layers", "width")
        return cls(p)
