"""Projectors under training: the weights of a projector as parameters, in units that one learning rate suits.

Inputs are standardised (each feature over its deviation), so a weight's size says what it does to the output: the features of a
raw source differ by orders of magnitude, and the RMS of a raw matrix is the RMS of the weights that matter least. Each parameter
has its own rate, in multiples of the learning rate: the RMS of the tensor that it changes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from moonpool.c2c.projectors.base import Projector
from moonpool.c2c.projectors.coded import CodedProjector
from moonpool.c2c.projectors.headlocal import HeadLocalParameters, HeadLocalProjector
from moonpool.c2c.projectors.linear import LinearParameters, LinearProjector, typed
from moonpool.c2c.projectors.lookback import LookBackProjector, before
from moonpool.c2c.projectors.mlp import MlpParameters, MlpProjector
from moonpool.c2c.projectors.trunk import TrunkParameters, TrunkProjector
from moonpool.errors import ConversionRefused

_HALVES = ("k", "v")
_DOWN = 0.32
"""Rate of a trunk's first matrix beside the second: all target layers hang on each of its columns."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Mean and deviation of each source feature, fp32 `[layers read, 2, width]`, and some standardised rows to look at."""

    mean: Tensor
    deviation: Tensor
    sample: Tensor
    """`[N, layers read, 2, width]`"""

    def weight(self, raw: Tensor, layers: Any = slice(None)) -> Tensor:
        """A matrix `[layers * 2 * width, out]` on raw features → on standardised ones."""
        return raw * self.deviation[layers].reshape(-1, 1)

    def raw(self, weight: Tensor, layers: Any = slice(None)) -> Tensor:
        return weight / self.deviation[layers].reshape(-1, 1)


class Full(nn.Module):
    """`x · W`, all of W trained."""

    def __init__(self, start: Tensor, rate: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(start.clone())
        self.rates = [(self.weight, rate * rms(start))]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype)

    def merged(self) -> Tensor:
        return self.weight.detach()


class LowRank(nn.Module):
    """`x · (W + A · B)`, W frozen, B zero at first. A's entries are of size 1/√rank, so that an entry of A · B moves as far in a
    step as an entry of W would."""

    base: Tensor

    def __init__(self, start: Tensor, rank: int, dtype: torch.dtype, rate: float = 1.0) -> None:
        super().__init__()
        *lead, rows, columns = start.shape
        rank = min(rank, rows, columns)
        generator = torch.Generator().manual_seed(rows * columns)
        self._start = start
        self.register_buffer("base", start.to(dtype), persistent=False)
        self.a = nn.Parameter(torch.randn(*lead, rows, rank, generator=generator) / math.sqrt(rank))
        self.b = nn.Parameter(torch.zeros(*lead, rank, columns))
        self.rates = [(self.a, rate / math.sqrt(rank)), (self.b, rate * rms(start))]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.base.to(x.dtype) + x @ self.a.to(x.dtype) @ self.b.to(x.dtype)

    def merged(self) -> Tensor:
        return self._start + (self.a @ self.b).detach().to(self._start.device)


Weight = Full | LowRank
MakeWeight = Callable[..., Weight]


class Pupil(nn.Module):
    """A projector under training. `forward` is its differentiable `project` for standardised inputs."""

    def __init__(self, projector: Projector) -> None:
        super().__init__()
        self.start = projector
        self.layers = {s: i for i, s in enumerate(projector.source_layers())}
        """Source layer → its place in `x`."""
        self._loose: list[tuple[nn.Parameter, float]] = []

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """`[N, layers read, 2, width]` standardised → fp32 `[N, target layers, 2, width]`, as the projector gives it."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What the projector is to hold now, for raw inputs, by the names that it uses."""

    def loose(self, start: Tensor, floor: float = 0.0) -> nn.Parameter:
        """A trained tensor beside the matrices; it moves as its own RMS, at least `floor`, has it."""
        parameter = nn.Parameter(start.clone())
        self._loose.append((parameter, max(rms(start), floor)))
        return parameter

    def rates(self) -> Iterator[tuple[nn.Parameter, float]]:
        """Every parameter and what the learning rate is multiplied by."""
        yield from self._loose
        for module in self.modules():
            if isinstance(module, Full | LowRank):
                yield from module.rates

    @torch.no_grad()
    def projector(self) -> Projector:
        """The projector as it is now; a correction is merged."""
        made = {n: t.to("cpu", torch.float32).contiguous() for n, t in self.tensors().items()}
        return type(self.start).build(self.start.parameters(), made)


class _Shelled(Pupil):
    """Keys of what `_affine` gives are put on the target's shell, where there is one."""

    shell: Tensor | None
    eps: float

    def _keep_shell(self, shell: Tensor | None, eps: float) -> None:
        self.register_buffer("shell", shell, persistent=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = self._affine(x).float()
        if self.shell is None:
            return y
        heads = y[:, :, 0].unflatten(-1, (-1, self.shell.shape[-1]))
        norm = torch.rsqrt(heads.square().mean(-1, keepdim=True) + self.eps)
        return torch.stack([(heads * norm * self.shell[None, :, None, :]).flatten(2), y[:, :, 1]], 2)

    @abstractmethod
    def _affine(self, x: Tensor) -> Tensor: ...

    def _with_shell(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors if self.shell is None else {**tensors, "shell": self.shell}


class LinearPupil(_Shelled):
    def __init__(self, projector: LinearProjector, scale: Scale, make: MakeWeight) -> None:
        super().__init__(projector)
        p: LinearParameters = typed(projector.parameters(), LinearParameters)
        held = projector.tensors()
        self._scale = scale
        self._reads = [[[self.layers[s] for s in half] for half in layer] for layer in p.sources]
        raw = [[held[f"layers.{t}.{h}.weight"] for h in _HALVES] for t in range(p.target_layers)]
        self.maps = nn.ModuleList(
            nn.ModuleList(make(scale.weight(w, at)) for w, at in zip(*pair, strict=True))
            for pair in zip(raw, self._reads, strict=True)
        )
        self.bias = self.loose(held["bias"] + self._shift(raw))
        self._keep_shell(held.get("shell"), p.eps)

    def _affine(self, x: Tensor) -> Tensor:
        made = []
        for maps, reads in zip(self.maps, self._reads, strict=True):
            of_k = x[:, reads[0]].flatten(1)
            of_v = of_k if reads[1] == reads[0] else x[:, reads[1]].flatten(1)
            made.append(torch.stack([maps[0](of_k), maps[1](of_v)], 1))  # type: ignore[index]  # a ModuleList of two
        return torch.stack(made, 1).float() + self.bias

    def tensors(self) -> dict[str, Tensor]:
        raw = [
            [self._scale.raw(m.merged().cpu(), at) for m, at in zip(maps, reads, strict=True)]  # type: ignore[call-overload]
            for maps, reads in zip(self.maps, self._reads, strict=True)
        ]
        found = {f"layers.{t}.{_HALVES[h]}.weight": w for t, pair in enumerate(raw) for h, w in enumerate(pair)}
        return self._with_shell({**found, "bias": self.bias.detach().cpu() - self._shift(raw)})

    def _shift(self, raw: list[list[Tensor]]) -> Tensor:
        """What the inputs' means give, `[target layers, 2, width]`."""
        return torch.stack(
            [
                torch.stack([self._scale.mean[at].flatten() @ w for w, at in zip(pair, reads, strict=True)])
                for pair, reads in zip(raw, self._reads, strict=True)
            ]
        )


class TrunkPupil(_Shelled):
    """The latent is standardised too: else the columns of `down` would differ in size as its eigenvalues do."""

    def __init__(
        self, projector: TrunkProjector | CodedProjector | LookBackProjector, scale: Scale, make: MakeWeight
    ) -> None:
        super().__init__(projector)
        trunk = {k: v for k, v in projector.parameters().items() if k in TrunkParameters.__struct_fields__}
        p: TrunkParameters = typed(trunk, TrunkParameters)
        held = projector.tensors()
        self._scale, self._layers = scale, p.target_layers
        down = scale.weight(held["down.weight"])
        deviation = (scale.sample.flatten(1) @ down).std(0).clamp(min=1e-6)
        self._deviation = deviation
        self.down, self.up = make(down / deviation, _DOWN), make(held["up.weight"] * deviation[:, None])
        shift = scale.mean.flatten() @ held["down.weight"] @ held["up.weight"]
        self.bias = self.loose(held["bias"] + shift.view_as(held["bias"]))
        self._keep_shell(held.get("shell"), p.eps)

    def _affine(self, x: Tensor) -> Tensor:
        y = self.up(self._latent(x))
        return y.float().unflatten(-1, (self._layers, 2, -1)) + self.bias

    def _latent(self, x: Tensor) -> Tensor:
        return self.down(x.flatten(1))

    def tensors(self) -> dict[str, Tensor]:
        down, up = self._scale.raw(self.down.merged().cpu()), self.up.merged().cpu()
        shift = (self._scale.mean.flatten() @ down @ up).view(self.bias.shape)
        return self._with_shell({"down.weight": down, "up.weight": up, "bias": self.bias.detach().cpu() - shift})


class CodedPupil(TrunkPupil):
    """A trunk whose code is trained along: its directions, its offsets, and how the latent reads it."""

    def __init__(self, projector: CodedProjector | LookBackProjector, scale: Scale, make: MakeWeight) -> None:
        super().__init__(projector, scale, make)
        held = projector.tensors()
        first = slice(0, 1)
        self.code = make(scale.weight(held["code.weight"], first), _DOWN)
        self.offset = self.loose(held["code.offset"] + scale.mean[first].flatten() @ held["code.weight"], floor=1e-2)
        self.read = make(held["read.weight"] / self._deviation, _DOWN)

    def _latent(self, x: Tensor) -> Tensor:
        hidden = gelu(self.code(x[:, 0].flatten(1)) + self.offset.to(x.dtype))
        return super()._latent(x) + self._read(hidden)

    def _read(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.read(hidden)
        return found

    def tensors(self) -> dict[str, Tensor]:
        code = self._scale.raw(self.code.merged().cpu(), slice(0, 1))
        offset = self.offset.detach().cpu() - self._scale.mean[:1].flatten() @ code
        # `up` is given for a latent of unit deviation, as `down` is, and so the read weights need no other unit.
        return {
            **super().tensors(),
            "code.weight": code,
            "code.offset": offset,
            "read.weight": self.read.merged().cpu(),
        }


class LookBackPupil(CodedPupil):
    """The code of the token before is read too, and what stands before a page's first token is trained along."""

    def __init__(self, projector: LookBackProjector, scale: Scale, make: MakeWeight) -> None:
        super().__init__(projector, scale, make)
        held = projector.tensors()
        self._page_size = projector.page_size
        self.blank = self.loose(held["code.blank"], floor=1e-2)
        self.back = make(held["back.weight"] / self._deviation, _DOWN)

    def _read(self, hidden: Tensor) -> Tensor:
        return super()._read(hidden) + self.back(before(hidden, self.blank, self._page_size))

    def tensors(self) -> dict[str, Tensor]:
        own = {"code.blank": self.blank.detach().cpu(), "back.weight": self.back.merged().cpu()}
        return {**super().tensors(), **own}


class HeadLocalPupil(_Shelled):
    def __init__(self, projector: HeadLocalProjector, scale: Scale, make: MakeWeight) -> None:
        super().__init__(projector)
        p: HeadLocalParameters = typed(projector.parameters(), HeadLocalParameters)
        held = projector.tensors()
        self._heads = p.heads
        self._reads = [[[[self.layers[s] for s in head] for head in half] for half in layer] for layer in p.sources]
        self._means, self._deviations = (self._by_head(t[None])[:, :, 0] for t in (scale.mean, scale.deviation))
        raw = [[held[f"layers.{t}.{h}.weight"] for h in _HALVES] for t in range(p.target_layers)]
        self.maps = nn.ModuleList(
            nn.ModuleList(make(w * self._of(self._deviations, at)[..., None]) for w, at in zip(*pair, strict=True))
            for pair in zip(raw, self._reads, strict=True)
        )
        self.bias = self.loose(held["bias"] + self._shift(raw))
        self._keep_shell(held.get("shell"), p.eps)

    def _by_head(self, x: Tensor) -> Tensor:
        """`[N, layers, 2, width]` → `[layers, heads, N, 2 * dim]`."""
        return x.unflatten(-1, (self._heads, -1)).permute(1, 3, 0, 2, 4).flatten(3)

    def _of(self, by_head: Tensor, reads: list[list[int]]) -> Tensor:
        """What each head reads, side by side: `[layers, heads, …, 2 * dim]` → `[heads, …, len(S) * 2 * dim]`."""
        return torch.stack([torch.cat([by_head[s, h] for s in layers], -1) for h, layers in enumerate(reads)])

    def _affine(self, x: Tensor) -> Tensor:
        by_head, made = self._by_head(x), []
        for maps, reads in zip(self.maps, self._reads, strict=True):
            halves = [m(self._of(by_head, at)) for m, at in zip(maps, reads, strict=True)]  # type: ignore[call-overload]
            made.append(torch.stack([y.transpose(0, 1).flatten(1) for y in halves], 1))
        return torch.stack(made, 1).float() + self.bias

    def tensors(self) -> dict[str, Tensor]:
        raw = [
            [m.merged().cpu() / self._of(self._deviations, at)[..., None] for m, at in zip(maps, reads, strict=True)]  # type: ignore[call-overload]
            for maps, reads in zip(self.maps, self._reads, strict=True)
        ]
        found = {f"layers.{t}.{_HALVES[h]}.weight": w for t, pair in enumerate(raw) for h, w in enumerate(pair)}
        return self._with_shell({**found, "bias": self.bias.detach().cpu() - self._shift(raw)})

    def _shift(self, raw: list[list[Tensor]]) -> Tensor:
        def half(w: Tensor, at: list[list[int]]) -> Tensor:
            return (self._of(self._means, at)[:, None] @ w).flatten()

        pairs = zip(raw, self._reads, strict=True)
        return torch.stack([torch.stack([half(w, at) for w, at in zip(p, reads, strict=True)]) for p, reads in pairs])


class MlpPupil(Pupil):
    gate: Tensor

    def __init__(self, projector: MlpProjector, scale: Scale, make: MakeWeight) -> None:
        super().__init__(projector)
        p: MlpParameters = typed(projector.parameters(), MlpParameters)
        held = projector.tensors()
        self._reads = [self.layers[s] for s in p.sources]
        self._mean, self._deviation = (
            t[self._reads] for t in (scale.mean, scale.deviation)
        )  # [target layers, 2, width]
        self.w1 = make(held["1.weight"] * self._deviation[..., None])
        self.w2, self.w3 = make(held["2.weight"]), make(held["3.weight"])
        shift = (self._mean[..., None, :] @ held["1.weight"])[..., 0, :]
        self.b1 = self.loose(held["1.bias"] + shift, floor=1e-2)
        self.b2, self.b3 = (self.loose(held[f"{i}.bias"], floor=1e-2) for i in (2, 3))
        self.register_buffer("gate", held["gate"], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, self._reads].permute(1, 2, 0, 3)
        for weight, bias in ((self.w1, self.b1), (self.w2, self.b2)):
            h = gelu(weight(h) + bias[:, :, None].to(h.dtype))
        y = (self.w3(h).float() + self.b3[:, :, None]) * torch.sigmoid(self.gate)[..., None, None]
        return y.permute(2, 0, 1, 3)

    def tensors(self) -> dict[str, Tensor]:
        w1 = self.w1.merged().cpu() / self._deviation[..., None]
        shift = (self._mean[..., None, :] @ w1)[..., 0, :]
        found = {"1.weight": w1, "2.weight": self.w2.merged(), "3.weight": self.w3.merged(), "gate": self.gate}
        return {
            **found,
            "1.bias": self.b1.detach().cpu() - shift,
            "2.bias": self.b2.detach(),
            "3.bias": self.b3.detach(),
        }


_PUPILS: dict[str, Callable[[Any, Scale, MakeWeight], Pupil]] = {
    LinearProjector.kind: LinearPupil,
    TrunkProjector.kind: TrunkPupil,
    CodedProjector.kind: CodedPupil,
    LookBackProjector.kind: LookBackPupil,
    HeadLocalProjector.kind: HeadLocalPupil,
    MlpProjector.kind: MlpPupil,
}


def pupil_of(projector: Projector, scale: Scale, rank: int, dtype: torch.dtype) -> Pupil:
    """`rank` 0 trains the whole weights, else a correction of that rank. Raises ConversionRefused (nothing to train)."""
    if projector.kind not in _PUPILS:
        raise ConversionRefused("this kind is not distilled", have=projector.kind, need=", ".join(sorted(_PUPILS)))

    def make(start: Tensor, rate: float = 1.0) -> Weight:
        return LowRank(start, rank, dtype, rate) if rank else Full(start, rate)

    return _PUPILS[projector.kind](projector, scale, make)


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
