"""Second stage of a projector: its weights are trained through the frozen target model.

    source KV ─► map ─► rotated ─► target's cache ─► target's next-token distribution q
                                    native cache ─► p            loss = KL(p ‖ q) on the continuation

A ridge makes the mapped cache *close*; this makes what the target says over it close, which is not the same (a small error in a
direction that queries look at costs more than a large one elsewhere). Only the continuation runs through the target, over a cache
that is injected, so a step costs a few dozen tokens a lesson and not the prefix. The state that is best on held-out lessons is
kept, the start among them: there the result is never worse than what came in.

Everything follows from the arguments. With a folder a training that is interrupted goes on where it was saved last, and comes to
the same end; several processes (`torchrun`) share each step and come to the same weights.

Memory: the target's weights, 16 B per trained weight (master, gradient, two moments; 12 more while a best state is kept and
saved), the maps' inputs and outputs of one pass (`2 or 4 B × prefix tokens × (source + target) layers × 2 × width`) and the
activations of the continuations.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import track
from torch import Tensor, nn

from moonpool.c2c.fitting.capture import CaptureStore
from moonpool.c2c.fitting.distil_class import Classroom
from moonpool.c2c.fitting.distil_inputs import Inputs
from moonpool.c2c.fitting.distil_lessons import Cut, Lesson, Lessons, cut, schedule
from moonpool.c2c.fitting.distil_options import DistilOptions
from moonpool.c2c.fitting.distil_pupils import Pupil, pupil_of
from moonpool.c2c.fitting.distil_record import Progress, Record, optimiser_tensors, restore_optimiser
from moonpool.c2c.fitting.distil_target import FrozenTarget
from moonpool.c2c.fitting.distil_world import World, open_world, silent
from moonpool.c2c.projectors.base import Projector
from moonpool.errors import ConfigError
from moonpool.keys import digest
from moonpool.plotting import plotting

__all__ = ["DistilOptions", "Distilled", "Lesson", "Lessons", "distil"]


class Distilled(msgspec.Struct, frozen=True):
    projector: Projector
    kl_before: float
    """Held-out KL of the projector that came in, nats per token, mean over the kinds."""
    kl_after: float
    steps: int
    """Step whose state was kept; 0 = nothing helped."""
    held: dict[str, float] = {}
    """Held-out KL of each kind at that step."""
    ended: str = ""
    """`patience` or `diverged` if it ended before its last step."""
    seconds: float = 0.0
    """Training time of all steps, without the start."""
    folder: Path | None = None
    """State and metrics."""
    writes: bool = True
    """This process is the one that writes results; of several, one is."""


def distil(
    projector: Projector,
    source: CaptureStore,
    target: CaptureStore,
    lessons: Lessons,
    options: DistilOptions,
    console: Console,
    folder: Path | None = None,
) -> Distilled:
    """Train on `lessons.train`, judge on `lessons.held`. State and metrics are kept under `folder`, in a folder that is named after
    all that decides the result.

    Raises ConversionRefused (a kind without weights, keys that are not made anew), ConfigError (no lessons, lessons too short,
    matplotlib missing), ConversionError (an unreadable state).
    """
    if options.plot:
        plotting()
    with open_world(options.device) as world:
        console = console if world.first else Console(quiet=True)
        inputs = Inputs(projector, source)
        _capture((source, target), world.share(_unique(lessons.documents(), source)), console)
        world.wait()
        scale = inputs.scale(
            [le.tokens for turn in itertools.zip_longest(*lessons.train.values()) for le in turn if le]
        )
        pupil = pupil_of(projector, scale, options.correction, options.dtype()).to(world.device)
        frozen = FrozenTarget(target.folder, options.dtype(), world.device, checkpointing=options.checkpointing)
        room = Classroom(inputs, scale, target, frozen, options.native_tokens, options.tail, options.position_weight)
        record = None
        if folder is not None:
            run = folder / _name(projector, (source, target), lessons, options, world.size)
            record = Record(run, [k for k, found in lessons.held.items() if found], writes=world.first)
        return _Training(pupil, room, lessons, options, world, record).run(console)


class _Training:
    def __init__(
        self,
        pupil: Pupil,
        room: Classroom,
        lessons: Lessons,
        options: DistilOptions,
        world: World,
        record: Record | None,
    ) -> None:
        o = self._o = options
        self._pupil, self._room, self._world, self._record = pupil, room, world, record
        self._wrapped = world.wrap(pupil)
        self._batches = schedule(lessons.train, o.mix, o.batch * world.size, o.prefix_range, o.continuation, o.seed)
        self._held = _Exam(lessons.held, o, room, world)
        self._parameters = dict(pupil.named_parameters())
        rates = {id(p): r for p, r in pupil.rates()}
        groups = [{"params": [p], "lr": 0.0, "scale": rates[id(p)]} for p in self._parameters.values()]
        self._adam = torch.optim.AdamW(groups, weight_decay=0.0, betas=(0.9, o.beta2), fused=True)

    def run(self, console: Console) -> Distilled:
        """From the last saved state, or from the start, to the end."""
        self._begin()
        at = self._at
        with Bar(console=console, transient=True) as bar:
            task = bar.add_task(f"distil, held-out KL {at.best:.4f}", total=self._o.steps, completed=at.step)
            while at.step < self._o.steps and not at.ended:
                self._step()
                bar.update(task, completed=at.step, description=f"distil, held-out KL {at.best:.4f} at {at.best_step}")
        if self._record and self._o.plot:
            self._record.plot()
        self._load(self._best)
        return Distilled(
            projector=self._pupil.projector(),
            kl_before=at.before,
            kl_after=at.best,
            steps=at.best_step,
            held=at.held,
            ended=at.ended,
            seconds=at.seconds,
            folder=self._record.folder if self._record else None,
            writes=self._world.first,
        )

    def _begin(self) -> None:
        saved = self._record.load() if self._record and self._o.resume else None
        if saved:
            self._at, self._best, now = saved
            self._load(now)
            restore_optimiser(self._adam, list(self._parameters), now)
            for _ in range(self._at.step):
                next(self._batches)
        else:
            held = self._held.judge(self._pupil)
            self._at = Progress(before=_mean(held), best=_mean(held), held=held)
            self._best = self._now()
        if self._record:
            self._record.rewind(self._at.step)
            if not saved:
                self._line(self._at.held)
        self._world.wait()

    def _step(self) -> None:
        at, began = self._at, time.perf_counter()
        at.step += 1
        rate = self._set_rate()
        loss = self._learn(next(self._batches))
        at.seconds += time.perf_counter() - began
        if not math.isfinite(loss):
            at.ended = "diverged"
        held: dict[str, float] = {}
        if not at.ended and (at.step % self._o.every == 0 or at.step == self._o.steps):
            held = self._look()
        self._line(held, learning_rate=rate, train_kl=loss)
        if held or at.ended or (self._o.checkpoint_every and at.step % self._o.checkpoint_every == 0):
            self._save()

    def _learn(self, batch: Sequence[Cut]) -> float:
        """One update; the mean KL of the batch, over all processes."""
        self._adam.zero_grad(set_to_none=True)
        own = sorted(self._world.share(batch), key=lambda c: c.prefix)  # alike prefixes together: less padding
        size = self._o.at_once or len(own)
        parts = [own[i : i + size] for i in range(0, len(own), size)]
        found = list[float]()
        for part in parts:
            with silent(self._wrapped) if part is not parts[-1] else nullcontext():
                loss, kl = self._room.loss(self._wrapped, part)
                (loss * (len(part) / len(own))).backward()
            found += kl
        nn.utils.clip_grad_norm_(self._parameters.values(), self._o.clip)
        self._adam.step()
        return float(self._world.total(torch.tensor(found, dtype=torch.float64).sum())) / len(batch)

    def _look(self) -> dict[str, float]:
        """Held-out KL; the state is kept if it is the best."""
        at, held = self._at, self._held.judge(self._pupil)
        found = _mean(held)
        if found < at.best:
            at.best, at.best_step, at.held = found, at.step, held
            self._best = self._now()
        elif (at.step - at.best_step) // self._o.every >= self._o.patience:
            at.ended = "patience"
        return held

    def _set_rate(self) -> float:
        """Short warm-up, then half a cosine."""
        o, step = self._o, self._at.step
        rate = (
            o.learning_rate * min(1.0, step / max(1, o.warm_up)) * 0.5 * (1 + math.cos(math.pi * (step - 1) / o.steps))
        )
        for group in self._adam.param_groups:
            group["lr"] = rate * group["scale"]
        return rate

    def _now(self) -> dict[str, Tensor]:
        return {n: p.detach().cpu().clone() for n, p in self._parameters.items()}

    @torch.no_grad()
    def _load(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[name])

    def _save(self) -> None:
        if self._record:
            moments = optimiser_tensors(self._adam, list(self._parameters))
            self._record.save(self._at, self._best, {**self._parameters, **moments})
            if self._o.plot:
                self._record.plot()

    def _line(self, held: dict[str, float], **values: float) -> None:
        if self._record:
            both = {"held_kl": _mean(held), **{f"held_{k}": v for k, v in held.items()}} if held else {}
            self._record.line({"step": self._at.step, "seconds": round(self._at.seconds, 2), **both, **values})


class _Exam:
    """The held-out lessons, cut once for all; what is wanted of them is computed once (2 or 4 B × hidden a token)."""

    def __init__(self, held: Mapping[str, Sequence[Lesson]], o: DistilOptions, room: Classroom, world: World) -> None:
        rng = random.Random(o.seed + 1)
        cuts = {
            k: [cut(le, o.prefix_range, o.held_continuation, rng) for le in found] for k, found in held.items() if found
        }
        if not cuts:
            raise ConfigError("there are no held-out lessons", fix="Give some: they decide which state is kept.")
        self._kinds, self._counts = list(cuts), [len(c) for c in cuts.values()]
        self._own = world.share([(i, c) for i, found in enumerate(cuts.values()) for c in found])
        self._room, self._world = room, world
        self._wanted: list[Tensor] = []

    @torch.no_grad()
    def judge(self, pupil: Pupil) -> dict[str, float]:
        """KL by kind, mean over its lessons."""
        self._wanted = self._wanted or [self._room.wanted([c]) for _, c in self._own]
        sums = torch.zeros(len(self._kinds), dtype=torch.float64)
        for (kind, c), wanted in zip(self._own, self._wanted, strict=True):
            sums[kind] += self._room.loss(pupil, [c], wanted)[1][0]
        found = (self._world.total(sums) / torch.tensor(self._counts)).tolist()
        return dict(zip(self._kinds, found, strict=True))


def _mean(held: dict[str, float]) -> float:
    return sum(held.values()) / len(held)


def _unique(documents: Sequence[Tensor], store: CaptureStore) -> list[Tensor]:
    return list({store.path(d): d for d in documents}.values())


def _capture(stores: Sequence[CaptureStore], documents: Sequence[Tensor], console: Console) -> None:
    """KV of what is not on disk yet."""
    for store in stores:
        missing = [d for d in documents if not store.path(d).is_file()]
        for tokens in track(missing, f"KV of {store.spec.name}", console=console, transient=True, disable=not missing):
            store.get(tokens)


def _name(
    projector: Projector, stores: Sequence[CaptureStore], lessons: Lessons, options: DistilOptions, processes: int
) -> str:
    """Of a training's folder: all that decides its result."""
    fields: list[tuple[str, str | bytes | int]] = [("processes", processes), ("kind", projector.kind)]
    deciding = msgspec.structs.replace(options, plot=False, resume=True, checkpoint_every=0)
    fields.append(("options", msgspec.json.encode(deciding)))
    fields += [(f"model {i}", s.spec.revision) for i, s in enumerate(stores)]
    fields.append(("parameters", msgspec.json.encode(projector.parameters())))
    fields += [(n, hashlib.sha256(t.numpy().tobytes()).digest()) for n, t in sorted(projector.tensors().items())]
    for side, part in (("train", lessons.train), ("held", lessons.held)):
        for kind, found in part.items():
            fields += [(f"{side} {kind} {le.prefix}", le.tokens.to(torch.int64).numpy().tobytes()) for le in found]
    return digest("moonpool.distil", fields)[:12]
