"""The lesson itself: what the target says over the native cache, and over what the pupil makes of the source's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moonpool.c2c.fitting.capture import KV, CaptureStore
from moonpool.c2c.fitting.distil_inputs import Inputs, Turn, read
from moonpool.c2c.fitting.distil_lessons import Cut
from moonpool.c2c.fitting.distil_pupils import Scale
from moonpool.c2c.fitting.distil_target import FrozenTarget

Map = Callable[[Tensor], Tensor]
"""A pupil's `forward`."""


class Classroom:
    """One pair of models, for a projector's kind of inputs."""

    def __init__(
        self,
        inputs: Inputs,
        scale: Scale,
        target: CaptureStore,
        frozen: FrozenTarget,
        native: int,
        tail: int,
        fading: float,
    ) -> None:
        """`native`, `tail` and `fading` as `native_tokens`, `tail` and `position_weight` in `DistilOptions`."""
        self._inputs, self._scale, self._target, self._frozen = inputs, scale, target, frozen
        self._native, self._tail, self._fading = native, tail, fading
        self._content = inputs.content
        self._turn: Turn | None = None

    def wanted(self, cuts: Sequence[Cut]) -> Tensor:
        """Last hidden states over the native cache, `[Σ asked, hidden]`."""
        with torch.no_grad():
            native = [self._native_part(c, 0, c.prefix) for c in cuts]
            return self._frozen.states([(n.k, n.v) for n in native], [c.tokens[c.prefix : c.end] for c in cuts])

    def loss(self, project: Map, cuts: Sequence[Cut], wanted: Tensor | None = None) -> tuple[Tensor, list[float]]:
        """Weighted KL, mean over the lessons, differentiable in what `project` gives; and the plain mean KL of each lesson, nats
        per token. `wanted`: what `wanted` gave for these cuts, where it is known already."""
        said = self._said(project, cuts)
        wanted = self.wanted(cuts) if wanted is None else wanted
        sizes = [c.asked for c in cuts]
        weights = torch.cat([self._weights(n) / (n * len(cuts)) for n in sizes]).to(said.device)
        loss, kl = self._frozen.divergence(said, wanted, weights)
        return loss, [float(part.mean()) for part in kl.split(sizes)]

    def _said(self, project: Map, cuts: Sequence[Cut]) -> Tensor:
        ends = [max(self._native, c.prefix - self._tail) for c in cuts]
        mapped = [Cut(c.tokens, end, c.end) for c, end in zip(cuts, ends, strict=True)]
        states = self._frozen.states(self._mapped(project, mapped), [c.tokens[c.prefix : c.end] for c in mapped])
        spare = [m.asked - c.asked for c, m in zip(cuts, mapped, strict=True)]
        if not any(spare):
            return states
        parts = states.split([m.asked for m in mapped])
        return torch.cat([p[s:] for p, s in zip(parts, spare, strict=True)])

    def _mapped(self, project: Map, cuts: Sequence[Cut]) -> list[tuple[Tensor, Tensor]]:
        """K (rotated) and V of each prefix, `[prefix, layers, heads, dim]`, the first tokens native."""
        frozen, spec = self._frozen, self._target.spec
        x = self._inputs.standardised(cuts, self._native, self._scale, frozen.dtype).to(frozen.device)
        y = project(x).unflatten(-1, (spec.num_kv_heads, spec.head_dim))
        at = torch.cat([torch.arange(self._native, c.prefix) for c in cuts]).to(frozen.device)
        k, v = y[:, :, 0], y[:, :, 1]
        k = self._turned(k, at, max(c.prefix for c in cuts)) if self._content else k
        sizes = [c.prefix - self._native for c in cuts]
        native = [self._native_part(c, 0, self._native) for c in cuts]
        parts = zip(native, k.to(frozen.dtype).split(sizes), v.to(frozen.dtype).split(sizes), strict=True)
        return [(torch.cat([n.k, a]), torch.cat([n.v, b])) for n, a, b in parts]

    def _turned(self, k: Tensor, at: Tensor, length: int) -> Tensor:
        rope = self._target.spec.rope
        if self._turn is None or self._turn.length < length:
            self._turn = Turn(rope, length, self._frozen.device)
        return self._turn(k, at)

    def _native_part(self, c: Cut, start: int, end: int) -> KV:
        kv = read(self._target, c.tokens, start, end)
        return KV(*(t.to(self._frozen.device, self._frozen.dtype) for t in (kv.k, kv.v)))

    def _weights(self, count: int) -> Tensor:
        weights = torch.exp(-self._fading * torch.arange(count, dtype=torch.float32))
        return weights / weights.mean()
