"""What every closed-form fit starts from: options, the memory it will take, moments, held-out rows, and who judges them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import msgspec
from rich.console import Console

from moonpool.c2c.fitting.attention import Judges
from moonpool.c2c.fitting.capture import CaptureStore
from moonpool.c2c.fitting.gather import ROWS_AT_ONCE, Documents, Pass, Weighting, key_gains, width_of
from moonpool.c2c.fitting.moments import Moments
from moonpool.c2c.fitting.selection import LAMBDAS, Holdout, Verdict
from moonpool.errors import ConfigError


class FitOptions(msgspec.Struct, frozen=True, kw_only=True):
    layers_per_target: int = 4
    """Source layers that each half of a target layer reads."""
    window: int = 6
    """Candidates: source layers within ± this of the depth-normalised and of the last-aligned index; 0 = all layers."""
    shell: bool = False
    """Put mapped keys on the target's key shell (targets with QK-norm only)."""
    attention: float = 0.0
    """How much a row's weight follows the attention that its token gets (`gather.Weighting`)."""
    lambdas: tuple[float, ...] = LAMBDAS
    choose: Literal["residual", "attention"] = "residual"
    """Source layers by held-out residual alone, or by the attention output's error among the few best of each step."""
    few: int = 3
    """Candidates of each step that the attention output decides among."""
    judged_documents: int = 4
    """Held-out documents whose attention outputs are compared; more are steadier and slower."""
    queries: int = 64
    """Queries of a document that are compared, or averaged over."""
    repair_values: bool = False
    """Fit values also to attention-averaged rows (`repair`)."""
    repair_documents: int = 128
    """Training documents, at most, that give averaged rows."""
    rank: int = 512
    """Width of the latent, for the trunk."""
    code: int = 0
    """Width of the token's code, for the coded and the look-back trunk: a multiple of a source layer's."""
    page_size: int = 16
    """Tokens of the pages that a look-back trunk is for."""
    seed: int = 0
    """Of the code's directions."""
    memory: int = 0
    """Bytes that the fit may take; 0 = no limit."""


class LayerFit(msgspec.Struct, frozen=True):
    """How one half of one target layer is read."""

    target_layer: int
    half: str
    source_layers: list[int]
    ridge: float
    r2: float
    error: float | None = None
    """Held-out relative squared error of the attention output that this half alone causes, where it was judged."""
    averaged: float = 0.0
    """Share of attention-averaged rows in the fit."""
    head: int | None = None
    """KV head, where heads are fitted apart."""


@dataclass
class Prepared:
    rows: Pass
    documents: Documents
    options: FitOptions
    moments: Moments
    holdout: Holdout

    @cached_property
    def judges(self) -> Judges:
        judged = self.documents.choose[: self.options.judged_documents]
        return Judges(self.rows.target, judged, self.options.queries, self.rows.weighting.gains)

    @property
    def whole(self) -> int:
        """Held-out rows that judges want, 0 where none is asked."""
        return self.judges[0].rows if self.options.choose == "attention" else 0

    def verdict(self, layer: int, half: int, head: int | None = None) -> Verdict | None:
        """Who decides among a step's few best, if somebody does."""
        if self.options.choose == "residual":
            return None
        judge = self.judges[layer] if head is None else self.judges[layer].head(head)
        return Verdict((judge.keys, judge.values)[half], judge.rows, self.options.few)

    def columns(self, layer: int, half: int) -> slice:
        """A target layer's keys (0) or values (1) in y."""
        width = width_of(self.rows.target.spec)
        return slice((2 * layer + half) * width, (2 * layer + half + 1) * width)


def prepare(
    source: CaptureStore,
    target: CaptureStore,
    documents: Documents,
    options: FitOptions,
    console: Console,
    extra: int = 0,
    rows: Pass | None = None,
) -> Prepared:
    """States the memory bound, then gathers. `extra`: bytes that the solver takes besides; `rows`: other columns than the
    layers. Raises ConfigError (no document, or more memory than allowed), ModelError."""
    if not documents.train or not documents.choose:
        raise ConfigError("documents are needed to fit on and to choose by", have="none")
    need = memory_bound(source, target, documents, options) + extra
    console.print(f"memory: {need / 1e9:.2f} GB at most, models included where KV is still to be captured")
    if options.memory and need > options.memory:
        raise ConfigError(
            "the fit takes more memory than allowed",
            need=f"{need / 1e9:.2f} GB",
            have=f"{options.memory / 1e9:.2f} GB",
            fix="Raise --memory, hold out fewer documents, or capture with a separate fit first.",
        )
    if rows is None:
        rows = Pass(source, target, Weighting(options.attention, key_gains(target) if options.shell else None))
    moments = rows.moments(documents.train, console)
    return Prepared(rows, documents, options, moments, rows.holdout(documents.choose))


def memory_bound(source: CaptureStore, target: CaptureStore, documents: Documents, options: FitOptions) -> int:
    """Bytes: accumulators, the block of rows that goes into them (as read, joined and scaled), held-out rows, the averaged rows'
    accumulators, a layer's solve, and the models where they must run."""
    s, t = source.spec, target.spec
    d, e = 2 * width_of(s) * s.num_layers, 2 * width_of(t) * t.num_layers
    longest = max(len(x) for x in (*documents.train, *documents.choose))
    block = 4 * (d + e) * (3 * ROWS_AT_ONCE + 2 * longest)
    held = 2 * 4 * (d + e) * sum(map(len, documents.choose))
    read = min(options.layers_per_target, s.num_layers) * 2 * width_of(s)
    solving = 8 * 6 * read * (read + width_of(t))
    judged = options.judged_documents * t.num_layers * t.num_heads * options.queries * (longest + 2 * t.head_dim) * 4
    averaged = 8 * t.num_layers * read * (read + width_of(t)) if options.repair_values else 0
    missing = source.missing([*documents.train, *documents.choose])
    models = target.model_bytes() + (source.model_bytes() if missing else 0)  # the target also gives its queries
    return Moments.bytes_needed(s.num_layers, 2 * width_of(s), e) + block + held + solving + judged + averaged + models
