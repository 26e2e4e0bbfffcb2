"""`lookback`: a coded trunk that also reads the code of the token before.

    h = gelu(x[0] · R + c)                                     [N, code]
    z = Σ over layers s: x[s] · A[s] + h · A' + h⁻ · A''       [N, rank]      h⁻: h of the token before
    y = z · B + b

In a transformer the keys of a low layer often say which token came *before*: heads that look one token back write it there, and
heads that copy what followed an earlier occurrence find their place by it. The source has such keys in another layer and in its own
embedding, so a map that sees one token at a time cannot make the target's (experiments/LOG.md: R² .43 without, .88 with).

Pages are converted one by one, so a page's first token has no token before it; `blank`, the mean code, stands there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import gelu

from moonpool.c2c.projectors.base import Projector, take
from moonpool.c2c.projectors.coded import CodedParameters
from moonpool.c2c.projectors.linear import positive, typed
from moonpool.c2c.projectors.shell import check_shell
from moonpool.c2c.projectors.trunk import TrunkParameters, TrunkProjector
from moonpool.errors import BundleCorrupt, ConversionRefused


class LookBackParameters(CodedParameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    page_size: int
    """Tokens of a page: no token looks beyond its own page."""

    def trunk(self) -> dict[str, Any]:
        """The part that is a trunk's."""
        return {name: getattr(self, name) for name in TrunkParameters.__struct_fields__}


def before(hidden: Tensor, blank: Tensor, page_size: int) -> Tensor:
    """Codes `[N, code]` of whole pages, one behind the other → the code of the token before each, `blank [code]` at a page's start.
    Raises ConversionRefused for rows that are no whole pages."""
    if len(hidden) % page_size:
        raise ConversionRefused(
            "a map that looks back takes whole pages", need=f"a multiple of {page_size} tokens", have=str(len(hidden))
        )
    pages = hidden.unflatten(0, (-1, page_size))
    return torch.cat([blank.to(hidden.dtype).expand(len(pages), 1, -1), pages[:, :-1]], 1).flatten(0, 1)


class LookBackProjector(Projector):
    kind: ClassVar[str] = "lookback"

    def __init__(self, parameters: LookBackParameters, trunk: TrunkProjector, code: dict[str, Tensor]) -> None:
        """`code`: `code.weight` `[2 * source width, code]`, `code.offset` and `code.blank` `[code]`, and how the latent reads the
        code of the token, `read.weight`, and of the one before, `back.weight`, both `[code, rank]`."""
        self._p, self._trunk, self._code = parameters, trunk, code
        self.key_space = trunk.key_space
        self.source_shape, self.target_shape = trunk.source_shape, trunk.target_shape
        self.target_head_dim = trunk.target_head_dim
        self.page_size = parameters.page_size

    def source_layers(self) -> list[int]:
        return self._trunk.source_layers()

    def project(self, x: Tensor) -> Tensor:
        c = self._code
        hidden = gelu(torch.addmm(c["code.offset"], x[:, 0].flatten(1), c["code.weight"]))
        latent = torch.mm(hidden, c["read.weight"])
        latent.addmm_(before(hidden, c["code.blank"], self.page_size), c["back.weight"])
        return self._trunk.project(x, latent)

    def flops_per_token(self) -> int:
        return self._trunk.flops_per_token() + 2 * sum(t.numel() for n, t in self._code.items() if n.endswith("weight"))

    def parameters(self) -> dict[str, Any]:
        return {**self._trunk.parameters(), "code": self._p.code, "page_size": self._p.page_size}

    def tensors(self) -> dict[str, Tensor]:
        return {**self._trunk.tensors(), **self._code}

    @classmethod
    def build(cls, parameters: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        p: LookBackParameters = typed(parameters, LookBackParameters)
        positive(p, "code", "page_size")
        if p.key_space != "content":
            raise BundleCorrupt("a code of rotated keys would not be the token's", key="key_space", have=p.key_space)
        check_shell(p.shell_dim, p.target_width, p.eps)
        shapes: dict[str, tuple[int, ...]] = {
            "code.weight": (2 * p.source_width, p.code),
            "code.offset": (p.code,),
            "code.blank": (p.code,),
            "read.weight": (p.code, p.rank),
            "back.weight": (p.code, p.rank),
        }
        code = {name: take(tensors, name, shape) for name, shape in shapes.items()}
        return cls(p, TrunkProjector.build(p.trunk(), tensors), code)
