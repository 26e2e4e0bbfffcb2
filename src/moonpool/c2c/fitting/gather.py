"""One pass over the documents' KV into moments that stay on disk.

The file is named after all that decides its content (both models' revisions and arithmetic, the documents in order, the rows'
weighting, key gains), and says how many documents went in: an interrupted pass goes on where it was saved last, and another fit
on the same documents (other λ, other layers, another kind of map) reads no KV at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.progress import track
from safetensors import safe_open
from torch import Tensor

from moonpool.c2c.fitting.capture import CaptureStore
from moonpool.c2c.fitting.features import rows
from moonpool.c2c.fitting.moments import Moments
from moonpool.c2c.fitting.selection import Holdout
from moonpool.c2c.signature import ModelSpec
from moonpool.clock import Clock, SystemClock
from moonpool.errors import ModelError
from moonpool.keys import digest

ROWS_AT_ONCE = 2048
SAVE_EVERY = 120.0
"""Seconds between two saves of an unfinished pass: a save of some GB takes seconds."""
_MOST = 30.0

Rows = tuple[Tensor, Tensor, Tensor]
"""x `[N, layers, 2, width]`, y likewise, weight `[N]`."""


class Documents(msgspec.Struct, frozen=True):
    """Documents (`[N]` token ids each) for the moments, and others for choosing layers and λ."""

    train: list[Tensor]
    choose: list[Tensor]


class Weighting(msgspec.Struct, frozen=True):
    """What besides the documents decides the rows."""

    attention: float = 0.0
    """Rows count by the attention that their token gets in the target: weight `1 - a + a · mass / mean mass`, at most
    `_MOST` (CacheBridge's idea: an error in a token that nobody looks at is harmless)."""
    gains: Tensor | None = None
    """The target's `k_norm` gains `[layers, head_dim]` that its keys are divided by, if any."""


class Pass:
    """The pair of models and how their KV becomes rows."""

    first = 1
    """Position that rows begin at: position 0 is the attention sink, and stays native."""

    def __init__(self, source: CaptureStore, target: CaptureStore, weighting: Weighting) -> None:
        self.source, self.target, self.weighting = source, target, weighting

    def document(self, tokens: Tensor) -> Rows:
        """Rows of one document from `first` on, fp32, keys un-rotated, target keys over the gains."""
        x = rows(self.source.get(tokens), self.source.spec.rope)[self.first :]
        y = rows(self.target.get(tokens), self.target.spec.rope)[self.first :]
        if self.weighting.gains is not None:
            y[:, :, 0] /= self.weighting.gains.repeat(1, self.target.spec.num_kv_heads)
        return x, y, self._weights(tokens)

    def _weights(self, tokens: Tensor) -> Tensor:
        a = self.weighting.attention
        if not a:
            return torch.ones(len(tokens) - self.first)
        mass = self.target.attention_mass(tokens)[:, self.first :].mean(0)
        return (1 - a + a * mass / mass.mean()).clamp(max=_MOST)

    def holdout(self, documents: Sequence[Tensor]) -> Holdout:
        x, y, w = (torch.cat(parts) for parts in zip(*map(self.document, documents), strict=True))
        return Holdout(x.flatten(2), y.flatten(1), w)

    def moments_path(self, documents: Sequence[Tensor]) -> Path:
        names = [(side, store.path(d).name) for d in documents for side, store in self._sides()]
        return self.source.work / "moments" / f"{digest('moonpool.moments', [*names, *self.facts()])}.safetensors"

    def facts(self) -> list[tuple[str, str]]:
        """What besides the documents decides the rows."""
        return [("attention", str(self.weighting.attention)), ("gains", str(self.weighting.gains is not None))]

    def moments(self, documents: Sequence[Tensor], console: Console, clock: Clock | None = None) -> Moments:
        """Moments of all documents, from disk as far as they are there."""
        path, clock = self.moments_path(documents), clock or SystemClock()
        found = Moments.load(path) if path.is_file() else self._empty()
        if found.done == len(documents):
            return found
        if found.done:
            console.print(f"moments: resumed behind document {found.done} of {len(documents)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        saved = clock.now()
        for count, (x, y, w) in batches(map(self.document, self._rest(documents, found.done, console))):
            found.add(x.flatten(1), y.flatten(1), w)
            found.done += count
            if clock.now() - saved >= SAVE_EVERY:
                found.save(path)
                saved = clock.now()
        found.save(path)
        return found

    def _sides(self) -> tuple[tuple[str, CaptureStore], tuple[str, CaptureStore]]:
        return ("source", self.source), ("target", self.target)

    def _empty(self) -> Moments:
        s, t = self.source.spec, self.target.spec
        return Moments(range(s.num_layers), 2 * width_of(s), 2 * width_of(t) * t.num_layers)

    @staticmethod
    def _rest(documents: Sequence[Tensor], done: int, console: Console) -> Iterable[Tensor]:
        return track(documents[done:], "moments", total=len(documents), completed=done, console=console, transient=True)


def width_of(spec: ModelSpec) -> int:
    """Columns of K, or of V, of one layer."""
    return spec.num_kv_heads * spec.head_dim


def batches(found: Iterable[Rows]) -> Iterator[tuple[int, Rows]]:
    """Documents put together, with their number: the accumulators are then walked through less often."""
    held: list[Rows] = []
    for rows_ in found:
        held.append(rows_)
        if sum(len(x) for x, _, _ in held) >= ROWS_AT_ONCE:
            yield len(held), _joined(held)
            held = []
    if held:
        yield len(held), _joined(held)


def _joined(parts: list[Rows]) -> Rows:
    x, y, w = (torch.cat(p) for p in zip(*parts, strict=True))
    return x, y, w


def key_gains(target: CaptureStore) -> Tensor:
    """The target's `k_norm` gains, fp32 `[layers, head_dim]`, read from its weights. Raises ModelError if it has none."""
    found: dict[int, Tensor] = {}
    for path in sorted(Path(target.folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dict
                if name.endswith(".self_attn.k_norm.weight"):
                    found[int(name.split(".")[-4])] = weights.get_tensor(name).to(torch.float32)
    gains = [found.get(t) for t in range(target.spec.num_layers)]
    if not all(g is not None and len(g) == target.spec.head_dim and bool((g.abs() > 1e-4).all()) for g in gains):
        raise ModelError("no usable k_norm gains", key=target.spec.name, fix="Fit without the key shell.")
    return torch.stack([g for g in gains if g is not None])
