"""Second stage of a `linear` projector: its weights are trained through the frozen target model.

    source KV ─► W0 + Δ ─► rotated ─► target's cache ─► target's next-token distribution q
                                                         native cache ─► p            loss = KL(p ‖ q) on the continuation

A ridge makes the mapped cache *close*; this makes what the target says over it close, which is not the same (a small error in a
direction that queries look at costs more than a large one elsewhere). Δ lives in standardised units and starts at zero, so one
learning rate serves all layers, and the best state by held-out KL is kept: the result is never worse there than the ridge.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from moonpool.c2c.fitting.capture import KV, CaptureStore, concat
from moonpool.c2c.fitting.features import rows
from moonpool.c2c.projectors.linear import LinearParameters, LinearProjector, typed
from moonpool.c2c.rope import attention_factor, inverse_frequencies
from moonpool.c2c.signature import RopeSpec
from moonpool.errors import ConversionRefused


class DistilOptions(msgspec.Struct, frozen=True, kw_only=True):
    steps: int = 60
    batch: int = 2
    """Documents of one step."""
    learning_rate: float = 1e-5
    """Of Δ, in standardised units. A step moves every weight by about this much, and a thousand inputs add up."""
    every: int = 10
    """Steps between two looks at the held-out documents."""
    native_tokens: int = 16
    """Tokens at the start that stay native, as the first page does when serving."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Lesson:
    """A document, cut: the first `prefix` tokens are mapped, the rest is what the target is asked about."""

    tokens: Tensor
    prefix: int


class Distilled(msgspec.Struct, frozen=True):
    projector: LinearProjector
    kl_before: float
    """Held-out KL of the projector that came in, nats per token."""
    kl_after: float
    steps: int
    """Step whose state was kept; 0 = nothing helped."""


@dataclass(slots=True)
class _Pupil:
    """The map under training."""

    parameters: LinearParameters
    base: list[list[Tensor]]
    bias: Tensor
    shell: Tensor | None
    delta: list[list[Tensor]]
    delta_bias: Tensor
    deviation_x: Tensor
    """`[source layers, 2 * width]`"""
    deviation_y: Tensor
    """`[target layers, 2, width]`"""

    def weight(self, t: int, half: int) -> Tensor:
        scale = self.deviation_x[self.parameters.sources[t][half]].flatten()
        return self.base[t][half] + self.delta[t][half] / scale[:, None] * self.deviation_y[t, half]

    def biases(self) -> Tensor:
        return self.bias + self.delta_bias * self.deviation_y

    def project(self, x: Tensor) -> Tensor:
        """Differentiable twin of `LinearProjector.project`."""
        flat, biases = x.flatten(2), self.biases()
        p = self.parameters
        y = [
            torch.stack([flat[:, p.sources[t][h]].flatten(1) @ self.weight(t, h) + biases[t, h] for h in (0, 1)], 1)
            for t in range(p.target_layers)
        ]
        found = torch.stack(y, 1)
        return found if self.shell is None else torch.stack([self._on_shell(found[:, :, 0]), found[:, :, 1]], 2)

    def _on_shell(self, k: Tensor) -> Tensor:
        assert self.shell is not None
        heads = k.unflatten(-1, (-1, self.parameters.shell_dim))
        norm = torch.rsqrt(heads.square().mean(-1, keepdim=True) + self.parameters.eps)
        return (heads * norm * self.shell[None, :, None, :]).flatten(2)

    def trained(self) -> list[Tensor]:
        return [*(d for pair in self.delta for d in pair), self.delta_bias]

    @torch.no_grad()
    def projector(self) -> LinearProjector:
        weights = [[self.weight(t, h) for h in (0, 1)] for t in range(self.parameters.target_layers)]
        return LinearProjector(self.parameters, weights, self.biases(), self.shell)


def distil(
    projector: LinearProjector,
    source: CaptureStore,
    target: CaptureStore,
    lessons: tuple[Sequence[Lesson], Sequence[Lesson]],
    options: DistilOptions,
    console: Console,
) -> Distilled:
    """Train on `lessons[0]`, judge on `lessons[1]`. Raises ConversionRefused for keys that are not in content space."""
    if projector.key_space != "content":
        raise ConversionRefused("only content-space projectors are distilled", have=projector.key_space)
    train, held = lessons
    pupil = _pupil(projector, source, target, [le.tokens for le in train[:16]])
    teacher = _Teacher(source, target, options.native_tokens)
    adam = torch.optim.AdamW(pupil.trained(), lr=options.learning_rate, weight_decay=0.0, betas=(0.9, 0.98))
    rng = random.Random(options.seed)
    before = best = teacher.held_out(pupil, held)
    kept, kept_at = [p.detach().clone() for p in pupil.trained()], 0
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"distil, held-out KL {before:.3f}", total=options.steps)
        for step in range(1, options.steps + 1):
            _set_rate(adam, options, step)
            _step(pupil, teacher, rng.sample(list(train), min(options.batch, len(train))), adam)
            if step % options.every == 0 or step == options.steps:
                found = teacher.held_out(pupil, held)
                if found < best:
                    best, kept, kept_at = found, [p.detach().clone() for p in pupil.trained()], step
                progress.update(task, description=f"distil, held-out KL {found:.3f}")
            progress.advance(task)
    with torch.no_grad():
        for parameter, value in zip(pupil.trained(), kept, strict=True):
            parameter.copy_(value)
    return Distilled(pupil.projector(), before, best, kept_at)


def _pupil(projector: LinearProjector, source: CaptureStore, target: CaptureStore, documents: list[Tensor]) -> _Pupil:
    """The projector with a Δ of zeros, and the deviations that give Δ its units."""
    parameters: LinearParameters = typed(projector.parameters(), LinearParameters)
    tensors = projector.tensors()
    base = [[tensors[f"layers.{t}.{h}.weight"] for h in "kv"] for t in range(parameters.target_layers)]
    x, y = (torch.cat([rows(s.get(d), s.spec.rope)[1:] for d in documents]) for s in (source, target))
    deviation_y = y.std(0).clamp(min=1e-4)
    if "shell" in tensors:  # keys are then predicted over their gains
        deviation_y[:, 0] /= tensors["shell"].repeat(1, deviation_y.shape[-1] // parameters.shell_dim).abs()
    delta = [[torch.zeros_like(w, requires_grad=True) for w in pair] for pair in base]
    bias = tensors["bias"]
    return _Pupil(
        parameters,
        base,
        bias,
        tensors.get("shell"),
        delta,
        torch.zeros_like(bias, requires_grad=True),
        x.std(0).clamp(min=1e-4).flatten(1),
        deviation_y,
    )


class _Teacher:
    """The frozen target: what it says over the native cache, and over the pupil's."""

    def __init__(self, source: CaptureStore, target: CaptureStore, native_tokens: int) -> None:
        self._source, self._target, self._native = source, target, native_tokens

    def loss(self, pupil: _Pupil, lesson: Lesson) -> Tensor:
        """KL(native ‖ pupil), mean over the lesson's continuation, nats per token."""
        native, asked = self._target.get(lesson.tokens)[: lesson.prefix], lesson.tokens[lesson.prefix :]
        spec, source = self._target.spec, self._source
        x = rows(source.get(lesson.tokens)[self._native : lesson.prefix], source.spec.rope, start=self._native)
        y = pupil.project(x).unflatten(-1, (spec.num_kv_heads, spec.head_dim))
        at = torch.arange(self._native, lesson.prefix)
        mapped = concat([native[: self._native], KV(_rotated(y[:, :, 0], at, spec.rope), y[:, :, 1])])
        model = self._target.model
        wanted = model.logits(native, asked).log_softmax(-1)
        said = model.logits(mapped, asked, grad=torch.is_grad_enabled()).log_softmax(-1)
        return (wanted.exp() * (wanted - said)).sum(-1).mean()

    @torch.no_grad()
    def held_out(self, pupil: _Pupil, lessons: Sequence[Lesson]) -> float:
        return float(torch.stack([self.loss(pupil, le) for le in lessons]).mean())


def _rotated(k: Tensor, positions: Tensor, rope: RopeSpec) -> Tensor:
    """Differentiable twin of `rope.rotate`."""
    angles = positions.to(torch.float64)[:, None] * inverse_frequencies(rope)
    scale = attention_factor(rope)
    cos, sin = ((f(angles) * scale).float()[:, None, None] for f in (torch.cos, torch.sin))
    half = cos.shape[-1]
    first, second, rest = k[..., :half], k[..., half : 2 * half], k[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _set_rate(adam: torch.optim.Optimizer, options: DistilOptions, step: int) -> None:
    """Short warm-up, then half a cosine."""
    warm = min(1.0, step / max(1, options.steps // 20))
    for group in adam.param_groups:
        group["lr"] = options.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * (step - 1) / options.steps))


def _step(pupil: _Pupil, teacher: _Teacher, lessons: Sequence[Lesson], adam: torch.optim.Optimizer) -> None:
    adam.zero_grad(set_to_none=True)
    for lesson in lessons:
        (teacher.loss(pupil, lesson) / len(lessons)).backward()
    torch.nn.utils.clip_grad_norm_(pupil.trained(), 1.0)
    adam.step()
