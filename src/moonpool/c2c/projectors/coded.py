"""`coded`: a trunk that also reads a code of the token itself.

    h = gelu(x[0] · R + c)                       [N, code]
    z = Σ over layers s: x[s] · A[s] + h · A'    [N, rank]
    y = z · B + b

No context has touched source layer 0: its K and V say which token stands there, and nothing else. The target's lowest layers are
functions of the token too, but of *its* embedding: with thousands of tokens in a few hundred numbers no affine map takes one
embedding to another. `code` random directions and a bend make room for such a table; they are trained on when the map is
distilled. Where the vocabulary is small this is most of what an affine map misses (experiments/LOG.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import gelu

from moonpool.c2c.projectors.base import Projector, take
from moonpool.c2c.projectors.linear import positive, typed
from moonpool.c2c.projectors.shell import check_shell
from moonpool.c2c.projectors.trunk import TrunkParameters, TrunkProjector
from moonpool.errors import BundleCorrupt


class CodedParameters(TrunkParameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    code: int
    """Width of the token's code."""


class CodedProjector(Projector):
    kind: ClassVar[str] = "coded"

    def __init__(self, parameters: CodedParameters, trunk: TrunkProjector, code: tuple[Tensor, Tensor, Tensor]) -> None:
        """`code`: directions `[2 * source width, code]`, offsets `[code]`, and how the latent reads the code `[code, rank]`."""
        self._p, self._trunk, self._code = parameters, trunk, code
        self.key_space = trunk.key_space
        self.source_shape, self.target_shape = trunk.source_shape, trunk.target_shape
        self.target_head_dim = trunk.target_head_dim

    def source_layers(self) -> list[int]:
        return self._trunk.source_layers()

    def project(self, x: Tensor) -> Tensor:
        directions, offsets, read = self._code
        hidden = gelu(torch.addmm(offsets, x[:, 0].flatten(1), directions))
        return self._trunk.project(x, torch.mm(hidden, read))

    def flops_per_token(self) -> int:
        return self._trunk.flops_per_token() + 2 * (self._code[0].numel() + self._code[2].numel())

    def parameters(self) -> dict[str, Any]:
        return {**self._trunk.parameters(), "code": self._p.code}

    def tensors(self) -> dict[str, Tensor]:
        directions, offsets, read = self._code
        own = {"code.weight": directions, "code.offset": offsets, "read.weight": read}
        return {**self._trunk.tensors(), **own}

    @classmethod
    def build(cls, parameters: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        p: CodedParameters = typed(parameters, CodedParameters)
        positive(p, "code")
        if p.key_space != "content":
            raise BundleCorrupt("a code of rotated keys would not be the token's", key="key_space", have=p.key_space)
        check_shell(p.shell_dim, p.target_width, p.eps)
        trunk = TrunkProjector.build({k: v for k, v in parameters.items() if k != "code"}, tensors)
        code = (
            take(tensors, "code.weight", (2 * p.source_width, p.code)),
            take(tensors, "code.offset", (p.code,)),
            take(tensors, "read.weight", (p.code, p.rank)),
        )
        return cls(p, trunk, code)
