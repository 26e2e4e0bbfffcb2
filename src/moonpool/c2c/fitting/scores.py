"""One measure for every closed-form variant: what its keys and values do to the target's attention on held-out documents."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from rich.table import Table
from torch import Tensor

from moonpool.c2c.fitting import features
from moonpool.c2c.fitting.attention import Judges
from moonpool.c2c.fitting.gather import Pass
from moonpool.c2c.fitting.prepare import LayerFit
from moonpool.c2c.projectors.base import Projector


class Score(msgspec.Struct, frozen=True):
    """Of one target layer. Errors are the attention output's, squared, over its square."""

    keys: float
    """Mapped keys, native values."""
    values: float
    """Native keys, mapped values."""
    both: float
    r2_keys: float
    r2_values: float


def scores(rows: Pass, projector: Projector, documents: Sequence[Tensor], queries: int = 64) -> list[Score]:
    """Each target layer's score. `rows.weighting.gains` must be given where the projector puts keys on a shell."""
    gains, heads = rows.weighting.gains, rows.target.spec.num_kv_heads
    native = torch.cat([rows.document(d)[1] for d in documents])
    # From position 0 on, as pages come; it is left out afterwards, as `rows` leaves it out.
    source, rope = rows.source, rows.source.spec.rope
    mapped = torch.cat([projector.project(features.rows(source.get(d), rope))[1:] for d in documents])
    if gains is not None:
        mapped[:, :, 0] /= gains.repeat(1, heads)
    judges = Judges(rows.target, documents, queries, gains)
    found = []
    for t in range(native.shape[1]):
        keys, values = mapped[:, t, 0], mapped[:, t, 1]
        r2 = [_r2(native[:, t, half], mapped[:, t, half]) for half in (0, 1)]
        judge = judges[t]
        found.append(Score(judge.keys(keys), judge.values(values), judge.both(keys, values), *r2))
    return found


def _r2(native: Tensor, mapped: Tensor) -> float:
    return 1 - float((native - mapped).square().sum() / (native - native.mean(0)).square().sum())


def mean(found: Sequence[Score]) -> Score:
    """Over the layers."""
    columns = zip(*(msgspec.structs.astuple(s) for s in found), strict=True)
    return Score(*(sum(c) / len(found) for c in columns))


def table(found: Sequence[Score], layers: Sequence[LayerFit]) -> Table:
    """A line per target layer and one for their mean."""
    shown = Table("layer", "K reads", "V reads", "K error", "V error", "both", "R² of K", "R² of V", title="held out")
    for t, score in enumerate(found):
        shown.add_row(str(t), _read(layers, t, "k"), _read(layers, t, "v"), *_numbers(score))
    shown.add_section()
    shown.add_row("mean", "", "", *_numbers(mean(found)))
    shown.caption = "error: of the attention output, squared, over its square"
    return shown


def _numbers(score: Score) -> list[str]:
    return [f"{v:.4f}" for v in msgspec.structs.astuple(score)]


def _read(layers: Sequence[LayerFit], t: int, half: str) -> str:
    read = [" ".join(map(str, f.source_layers)) for f in layers if (f.target_layer, f.half) == (t, half)]
    return " · ".join(read) if all(len(r) < 24 for r in read) else "all"
