"""`moonpool c2c fit`: a projector in closed form, or the baseline, from text files."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.c2c.commands.common import (
    OTHER_FACTS,
    Folder,
    Held,
    Prefix,
    Seed,
    Storage,
    Stored,
    Texts,
    Tokens,
    Work,
    fact_documents,
    one_line,
    open_console,
    open_stores,
    split_texts,
)
from moonpool.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from moonpool.c2c.commands.common import Pair
    from moonpool.c2c.fitting.distil import DistilOptions
    from moonpool.c2c.fitting.mlp import MlpOptions
    from moonpool.c2c.fitting.prepare import FitOptions, LayerFit
    from moonpool.c2c.fitting.ridge import Documents
    from moonpool.c2c.projectors.base import Projector


class Kind(Enum):
    LINEAR = "linear"
    MLP = "mlp"


class Variant(Enum):
    FULL = "full"
    HEAD_LOCAL = "head-local"
    TRUNK = "trunk"
    CODED = "coded"
    LOOK_BACK = "look-back"


class Choose(Enum):
    RESIDUAL = "residual"
    ATTENTION = "attention"


@one_line
def fit(
    source: Folder,
    target: Folder,
    text: Texts,
    out: Annotated[Path, typer.Option(help="bundle folder to write")],
    kind: Annotated[Kind, typer.Option(help="linear: ridge; mlp: issue #1520's recipe, the baseline")] = Kind.LINEAR,
    variant: Annotated[
        Variant,
        typer.Option(
            help="full: all heads of a few source layers; head-local: head h from head h alone; trunk: a low-rank latent of all "
            "source layers; coded: a trunk that also reads a code of the token; look-back: and the code of the token before"
        ),
    ] = Variant.FULL,
    layers_per_target: Annotated[int, typer.Option(min=1, help="source layers that each target layer reads")] = 4,
    rank: Annotated[
        int, typer.Option(min=1, help="width of the latent, for --variant trunk, coded and look-back")
    ] = 512,
    code: Annotated[
        int,
        typer.Option(
            min=0, help="width of the token's code, for coded and look-back: a multiple of a source layer's K and V"
        ),
    ] = 1024,
    tokens: Tokens = 24576,
    seed: Seed = 0,
    window: Annotated[int, typer.Option(min=0, help="candidate layers around the aligned ones; 0 = all")] = 6,
    choose: Annotated[
        Choose, typer.Option(help="source layers by held-out residual, or by the attention output among the few best")
    ] = Choose.ATTENTION,
    attention: Annotated[
        float, typer.Option(min=0, max=1, help="how much the attention that a token gets weighs its row")
    ] = 0.0,
    repair_values: Annotated[
        bool, typer.Option("--repair-values", help="fit values also to attention-averaged rows (not for head-local)")
    ] = False,
    ridge: Annotated[
        list[float] | None, typer.Option(help="relative ridge term to try; repeat [default: 1e-5 to 1e-1]")
    ] = None,
    shell: Annotated[bool, typer.Option(help="re-normalise mapped keys as the target's k_norm does")] = False,
    memory: Annotated[float, typer.Option(min=0, help="GB that the fit may take; 0 = no limit")] = 0,
    steps: Annotated[int, typer.Option(min=0, help="distillation steps through the target after the ridge")] = 0,
    facts: Annotated[int, typer.Option(min=0, help="fact documents to fit on besides the texts")] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="at most, for --kind mlp")] = 40,
    prefix: Prefix = 448,
    held: Held = 12,
    work: Work = None,
    storage: Stored = Storage.BFLOAT16,
) -> None:
    """Fit a projector on text files and write it as a bundle.

    Sums over the documents stay in the work folder: an interrupted fit goes on where it stopped, and another fit on the same
    documents needs no second pass.
    """
    import torch

    from moonpool.c2c.bundle import write_bundle
    from moonpool.c2c.fitting.distil import DistilOptions
    from moonpool.c2c.fitting.mlp import MlpOptions
    from moonpool.c2c.fitting.prepare import FitOptions
    from moonpool.c2c.fitting.ridge import Documents
    from moonpool.c2c.fitting.rounding import for_storage
    from moonpool.c2c.fitting.selection import LAMBDAS

    if variant is not Variant.FULL and steps:
        raise ConfigError(
            "only the full variant is distilled by fit",
            have=f"--variant {variant.value}",
            need="--steps 0",
            fix="Give the bundle to `moonpool c2c distil`.",
        )
    if variant in (Variant.HEAD_LOCAL, Variant.CODED, Variant.LOOK_BACK) and repair_values:
        raise ConfigError(f"a {variant.value} fit has no --repair-values", need="--variant full or trunk")
    console, pair = open_console(), open_stores(source, target, work)
    parts = split_texts(pair, text, tokens, seed, prefix, held)
    asked = fact_documents(pair, prefix, facts, seed + OTHER_FACTS)
    documents = Documents([*parts.train, *(f.told() for f in asked)], parts.choose)
    projector: Projector
    if kind is Kind.MLP:
        projector = _mlp(pair, documents, MlpOptions(seed=seed, epochs=epochs), console)
    else:
        options = FitOptions(
            layers_per_target=layers_per_target,
            window=window,
            shell=shell,
            attention=attention,
            lambdas=tuple(ridge) if ridge else LAMBDAS,
            choose=choose.value,
            repair_values=repair_values,
            rank=rank,
            code=code,
            seed=seed,
            memory=round(memory * 1e9),
        )
        distil = DistilOptions(steps=steps, seed=seed)
        projector = _closed_form(pair, documents, variant, (options, distil), prefix, console)
    data = [*parts.fitted, *([f"{facts} fact documents"] if facts else [])]
    made = f"moonpool c2c fit --kind {kind.value} --seed {seed} --tokens {tokens} --steps {steps} --facts {facts}"
    made += f" --variant {variant.value} --choose {choose.value}" if kind is Kind.LINEAR else ""
    dtype = getattr(torch, storage.value)
    bundle = write_bundle(
        out,
        for_storage(projector, pair[0], documents.train, dtype),
        pair[0].spec,
        pair[1].spec,
        dtype=dtype,
        training_data=data,
        created_by=made,
    )
    console.print(f"{out}: bundle {bundle.digest}, {projector.flops_per_token() / 1e6:.1f} MFLOP per token")


def _closed_form(
    pair: Pair,
    documents: Documents,
    variant: Variant,
    options: tuple[FitOptions, DistilOptions],
    prefix: int,
    console: Console,
) -> Projector:
    from moonpool.c2c.fitting.coded import fit_coded
    from moonpool.c2c.fitting.headlocal import fit_head_local
    from moonpool.c2c.fitting.lookback import fit_lookback
    from moonpool.c2c.fitting.ridge import fit_linear
    from moonpool.c2c.fitting.selection import LAMBDAS
    from moonpool.c2c.fitting.trunk import LAMBDAS as FEW
    from moonpool.c2c.fitting.trunk import fit_trunk

    match variant:
        case Variant.FULL:
            full = fit_linear(*pair, documents, options[0], console)
            _show(pair, documents, options[0], full.projector, full.layers, console)
            return _distilled(pair, documents, full.projector, options[1], prefix, console)
        case Variant.HEAD_LOCAL:
            local = fit_head_local(*pair, documents, options[0], console)
            _show(pair, documents, options[0], local.projector, local.layers, console)
            return local.projector
        case Variant.TRUNK:
            ridges = FEW if options[0].lambdas == LAMBDAS else options[0].lambdas
            trunk = fit_trunk(*pair, documents, options[0], console, ridges)
            _show(pair, documents, options[0], trunk.projector, trunk.layers, console)
            return trunk.projector
        case Variant.CODED:
            coded = fit_coded(*pair, documents, options[0], console)
            _show(pair, documents, options[0], coded.projector, [], console)
            return coded.projector
        case Variant.LOOK_BACK:
            looking = fit_lookback(*pair, documents, options[0], console)
            _show(pair, documents, options[0], looking.projector, [], console)
            return looking.projector


def _show(
    pair: Pair, documents: Documents, options: FitOptions, made: Projector, layers: list[LayerFit], console: Console
) -> None:
    """Held-out measures of each target layer, and which source layers it reads."""
    from moonpool.c2c.fitting.gather import Pass, Weighting, key_gains
    from moonpool.c2c.fitting.scores import scores, table

    weighting = Weighting(gains=key_gains(pair[1]) if options.shell else None)
    judged = documents.choose[: options.judged_documents]
    console.print(table(scores(Pass(*pair, weighting), made, judged, options.queries), layers))


def _distilled(
    pair: Pair, documents: Documents, start: Projector, options: DistilOptions, prefix: int, console: Console
) -> Projector:
    """As many distillation steps as asked for."""
    from moonpool.c2c.fitting.distil import Lesson, Lessons, distil

    if not options.steps:
        return start
    train, choose = ({"text": [Lesson(d, prefix) for d in part]} for part in (documents.train, documents.choose))
    found = distil(start, *pair, Lessons(train, choose), options, console)
    console.print(f"distilled: held-out KL {found.kl_before:.3f} → {found.kl_after:.3f} at step {found.steps}")
    return found.projector


def _mlp(pair: Pair, documents: Documents, options: MlpOptions, console: Console) -> Projector:
    from moonpool.c2c.fitting.mlp import fit_mlp

    found = fit_mlp(*pair, documents, options, console)
    console.print(f"mlp: {found.epochs} epochs, held-out MSE {found.heldout_mse:.4f} of the outputs' variance")
    return found.projector
