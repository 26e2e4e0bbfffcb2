"""A look-back trunk in closed form: the trunk's regression with the codes of the token and of the one before as further columns.

As in `coded`, the code's directions are drawn at random and the columns stand behind the source's layers as if they were further
layers. Rows are whole pages behind the first one, which is never converted.
"""

from __future__ import annotations

import msgspec
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import gelu

from moonpool.c2c.fitting.capture import CaptureStore
from moonpool.c2c.fitting.coded import check_code, random_code
from moonpool.c2c.fitting.gather import Documents, Pass, Rows, Weighting, key_gains, width_of
from moonpool.c2c.fitting.moments import Moments
from moonpool.c2c.fitting.prepare import FitOptions, prepare
from moonpool.c2c.fitting.trunk import LAMBDAS, best_trunk
from moonpool.c2c.projectors.lookback import LookBackParameters, LookBackProjector, before
from moonpool.c2c.projectors.trunk import TrunkParameters, TrunkProjector

_LOOK_AT = 16
"""Documents that give the mean code."""


class LookBackFit(msgspec.Struct, frozen=True):
    projector: LookBackProjector
    ridge: float


class PagePass(Pass):
    """Whole pages behind the first."""

    def __init__(self, source: CaptureStore, target: CaptureStore, weighting: Weighting, page_size: int) -> None:
        super().__init__(source, target, weighting)
        self.first = self.page_size = page_size

    def document(self, tokens: Tensor) -> Rows:
        return super().document(tokens[: len(tokens) // self.page_size * self.page_size])

    def facts(self) -> list[tuple[str, str]]:
        return [*super().facts(), ("page_size", str(self.page_size))]


class LookBackPass(PagePass):
    """Rows whose x has both codes behind the layers: `[N, layers + 2 * code / layer width, 2, width]`."""

    def __init__(self, plain: PagePass, code: tuple[Tensor, Tensor], blank: Tensor) -> None:
        """`code`: directions `[layer width, code]`, offsets `[code]`; `blank [code]` stands before a page's first token."""
        super().__init__(plain.source, plain.target, plain.weighting, plain.page_size)
        self.code, self.blank = code, blank

    def document(self, tokens: Tensor) -> Rows:
        x, y, w = super().document(tokens)
        hidden = codes(x, self.code)
        both = torch.cat([hidden, before(hidden, self.blank, self.page_size)], 1)
        return torch.cat([x, both.view(len(x), -1, *x.shape[2:])], 1), y, w

    def facts(self) -> list[tuple[str, str]]:
        directions, offsets = self.code
        sums = " ".join(f"{float(t.sum()):.9e}" for t in (directions, offsets, self.blank))
        return [*super().facts(), ("look back", f"{directions.shape[1]} {sums}")]

    def _empty(self) -> Moments:
        s, t = self.source.spec, self.target.spec
        more = 2 * self.blank.numel() // (2 * width_of(s))
        return Moments(range(s.num_layers + more), 2 * width_of(s), 2 * width_of(t) * t.num_layers)


def fit_lookback(
    source: CaptureStore,
    target: CaptureStore,
    documents: Documents,
    options: FitOptions,
    console: Console,
    lambdas: tuple[float, ...] = LAMBDAS,
) -> LookBackFit:
    """Fit a code of `options.code` numbers and a latent of `options.rank` for pages of `options.page_size` tokens. Raises as
    `fit_linear`."""
    check_code(source.spec, options.code)
    weighting = Weighting(options.attention, key_gains(target) if options.shell else None)
    plain = PagePass(source, target, weighting, options.page_size)
    code = random_code(plain, documents, options.code, options.seed)
    blank = torch.cat([codes(plain.document(d)[0], code) for d in documents.train[:_LOOK_AT]]).mean(0)
    rows = LookBackPass(plain, code, blank)
    layers = 2 * width_of(source.spec) * source.spec.num_layers
    d, e = layers + 2 * options.code, 2 * width_of(target.spec) * target.spec.num_layers
    more = 8 * (d * d - layers**2 + 2 * options.code * e)
    start = prepare(source, target, documents, options, console, 8 * (3 * d * d + 3 * d * e + 3 * e * e) + more, rows)
    found, ridge = best_trunk(start, lambdas, min(options.rank, layers, e), console)
    return LookBackFit(_split(found, source.spec.num_layers, rows), ridge)


def codes(x: Tensor, code: tuple[Tensor, Tensor]) -> Tensor:
    """`[N, layers, 2, width]` → `[N, code]`."""
    return gelu(torch.addmm(code[1], x[:, 0].flatten(1), code[0]))


def _split(found: TrunkProjector, layers: int, rows: LookBackPass) -> LookBackProjector:
    """The latent's rows that read the layers, the code, and the code before."""
    p, tensors = msgspec.convert(found.parameters(), TrunkParameters), found.tensors()
    size = rows.blank.numel()
    down, read, back = tensors["down.weight"].split([layers * 2 * p.source_width, size, size])
    trunk = TrunkProjector(
        msgspec.structs.replace(p, source_layers=layers),
        down.contiguous(),
        tensors["up.weight"],
        tensors["bias"],
        tensors.get("shell"),
    )
    own = LookBackParameters(**trunk.parameters(), code=size, page_size=rows.page_size)
    held = {"code.weight": rows.code[0], "code.offset": rows.code[1], "code.blank": rows.blank}
    return LookBackProjector(own, trunk, {**held, "read.weight": read.contiguous(), "back.weight": back.contiguous()})
