"""A coded trunk in closed form: the trunk's regression with the token's code as further columns.

The code's directions are drawn at random, in units of the features' deviation, and left as they are; distillation trains them.
Its numbers stand behind the source's layers as if they were further layers of the same width, so that moments, held-out rows and
the solver take them as they take layers.
"""

from __future__ import annotations

import math

import msgspec
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import gelu

from moonpool.c2c.fitting.capture import CaptureStore
from moonpool.c2c.fitting.gather import Documents, Pass, Rows, Weighting, key_gains, width_of
from moonpool.c2c.fitting.moments import Moments
from moonpool.c2c.fitting.prepare import FitOptions, prepare
from moonpool.c2c.fitting.trunk import LAMBDAS, best_trunk
from moonpool.c2c.projectors.coded import CodedParameters, CodedProjector
from moonpool.c2c.projectors.trunk import TrunkParameters, TrunkProjector
from moonpool.c2c.signature import ModelSpec
from moonpool.errors import ConfigError

_SPREAD, _OFFSET = 1.5, 0.5
"""Deviation of what goes into the bend, and of the offsets: most of the bends then bend."""
_LOOK_AT = 16
"""Documents that give the features' deviation."""


class CodedFit(msgspec.Struct, frozen=True):
    projector: CodedProjector
    ridge: float


class CodedPass(Pass):
    """Rows whose x has the code behind the layers: `[N, layers + code / layer width, 2, width]`."""

    def __init__(
        self, source: CaptureStore, target: CaptureStore, weighting: Weighting, code: tuple[Tensor, Tensor]
    ) -> None:
        super().__init__(source, target, weighting)
        self.code = code

    def document(self, tokens: Tensor) -> Rows:
        x, y, w = super().document(tokens)
        hidden = gelu(torch.addmm(self.code[1], x[:, 0].flatten(1), self.code[0]))
        return torch.cat([x, hidden.view(len(x), -1, *x.shape[2:])], 1), y, w

    def facts(self) -> list[tuple[str, str]]:
        directions, offsets = self.code
        return [
            *super().facts(),
            ("code", f"{directions.shape[1]} {float(directions.sum()):.9e} {float(offsets.sum()):.9e}"),
        ]

    def _empty(self) -> Moments:
        s, t = self.source.spec, self.target.spec
        more = self.code[1].numel() // (2 * width_of(s))
        return Moments(range(s.num_layers + more), 2 * width_of(s), 2 * width_of(t) * t.num_layers)


def fit_coded(
    source: CaptureStore,
    target: CaptureStore,
    documents: Documents,
    options: FitOptions,
    console: Console,
    lambdas: tuple[float, ...] = LAMBDAS,
) -> CodedFit:
    """Fit a code of `options.code` numbers and a latent of `options.rank`. Raises as `fit_linear`."""
    check_code(source.spec, options.code)
    weighting = Weighting(options.attention, key_gains(target) if options.shell else None)
    code = random_code(Pass(source, target, weighting), documents, options.code, options.seed)
    rows = CodedPass(source, target, weighting, code)
    d = 2 * width_of(source.spec) * source.spec.num_layers + options.code
    e = 2 * width_of(target.spec) * target.spec.num_layers
    more = 8 * (d * d - (d - options.code) ** 2 + options.code * e)
    start = prepare(source, target, documents, options, console, 8 * (3 * d * d + 3 * d * e + 3 * e * e) + more, rows)
    found, ridge = best_trunk(start, lambdas, min(options.rank, d, e), console)
    return CodedFit(_split(found, source.spec.num_layers, code), ridge)


def check_code(source: ModelSpec, code: int) -> None:
    """Raises ConfigError unless the code fills whole layers."""
    width = 2 * width_of(source)
    if code < width or code % width:
        raise ConfigError("the code must be whole layers wide", need=f"a multiple of {width}", have=str(code))


def random_code(rows: Pass, documents: Documents, code: int, seed: int) -> tuple[Tensor, Tensor]:
    """Directions `[layer width, code]` and offsets `[code]`, for features as they are."""
    x = torch.cat([rows.document(d)[0][:, 0].flatten(1) for d in documents.train[:_LOOK_AT]])
    mean, deviation = x.mean(0), x.std(0).clamp(min=1e-4)
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(x.shape[1], code, generator=generator) * (_SPREAD / math.sqrt(x.shape[1]))
    directions /= deviation[:, None]
    return directions, torch.randn(code, generator=generator) * _OFFSET - mean @ directions


def _split(found: TrunkProjector, layers: int, code: tuple[Tensor, Tensor]) -> CodedProjector:
    """The latent's rows that read the code, apart from those that read the layers."""
    p, tensors = msgspec.convert(found.parameters(), TrunkParameters), found.tensors()
    cut = layers * 2 * p.source_width
    trunk = TrunkProjector(
        msgspec.structs.replace(p, source_layers=layers),
        tensors["down.weight"][:cut].contiguous(),
        tensors["up.weight"],
        tensors["bias"],
        tensors.get("shell"),
    )
    own = CodedParameters(**trunk.parameters(), code=code[1].numel())
    return CodedProjector(own, trunk, (*code, tensors["down.weight"][cut:].contiguous()))
