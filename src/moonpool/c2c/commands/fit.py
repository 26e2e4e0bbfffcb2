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
    Texts,
    Tokens,
    Work,
    fact_documents,
    one_line,
    open_console,
    open_stores,
    split_texts,
)

if TYPE_CHECKING:
    from rich.console import Console

    from moonpool.c2c.commands.common import Pair
    from moonpool.c2c.fitting.distil import DistilOptions
    from moonpool.c2c.fitting.mlp import MlpOptions
    from moonpool.c2c.fitting.ridge import Documents, FitOptions
    from moonpool.c2c.projectors.base import Projector
    from moonpool.c2c.projectors.linear import LinearProjector


class Kind(Enum):
    LINEAR = "linear"
    MLP = "mlp"


@one_line
def fit(
    source: Folder,
    target: Folder,
    text: Texts,
    out: Annotated[Path, typer.Option(help="bundle folder to write")],
    kind: Annotated[Kind, typer.Option(help="linear: ridge; mlp: issue #1520's recipe, the baseline")] = Kind.LINEAR,
    layers_per_target: Annotated[int, typer.Option(min=1, help="source layers that each target layer reads")] = 4,
    tokens: Tokens = 24576,
    seed: Seed = 0,
    window: Annotated[int, typer.Option(min=0, help="candidate layers around the aligned ones; 0 = all")] = 6,
    shell: Annotated[bool, typer.Option(help="re-normalise mapped keys as the target's k_norm does")] = False,
    steps: Annotated[int, typer.Option(min=0, help="distillation steps through the target after the ridge")] = 0,
    facts: Annotated[int, typer.Option(min=0, help="fact documents to fit on besides the texts")] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="at most, for --kind mlp")] = 40,
    prefix: Prefix = 448,
    held: Held = 12,
    work: Work = None,
) -> None:
    """Fit a projector on text files and write it as a bundle."""
    from moonpool.c2c.bundle import write_bundle
    from moonpool.c2c.fitting.distil import DistilOptions
    from moonpool.c2c.fitting.mlp import MlpOptions
    from moonpool.c2c.fitting.ridge import Documents, FitOptions

    console, pair = open_console(), open_stores(source, target, work)
    parts = split_texts(pair, text, tokens, seed, prefix, held)
    asked = fact_documents(pair, prefix, facts, seed + OTHER_FACTS)
    documents = Documents([*parts.train, *(f.told() for f in asked)], parts.choose)
    projector: Projector
    if kind is Kind.MLP:
        projector = _mlp(pair, documents, MlpOptions(seed=seed, epochs=epochs), console)
    else:
        options = FitOptions(layers_per_target=layers_per_target, window=window, shell=shell)
        distil = DistilOptions(steps=steps, seed=seed)
        projector = _linear(pair, documents, (options, distil), prefix, console)
    data = [*parts.fitted, *([f"{facts} fact documents"] if facts else [])]
    made = f"moonpool c2c fit --kind {kind.value} --seed {seed} --tokens {tokens} --steps {steps} --facts {facts}"
    bundle = write_bundle(out, projector, pair[0].spec, pair[1].spec, training_data=data, created_by=made)
    console.print(f"{out}: bundle {bundle.digest}, {projector.flops_per_token() / 1e6:.1f} MFLOP per token")


def _linear(
    pair: Pair, documents: Documents, options: tuple[FitOptions, DistilOptions], prefix: int, console: Console
) -> LinearProjector:
    """The ridge, then as many distillation steps as asked for."""
    from moonpool.c2c.fitting.distil import Lesson, distil
    from moonpool.c2c.fitting.ridge import fit_linear

    ridge = fit_linear(*pair, documents, options[0], console)
    for half in ("k", "v"):
        r2 = [f.r2 for f in ridge.layers if f.half == half]
        console.print(f"{half}: held-out R² {min(r2):.3f} … {max(r2):.3f}, mean {sum(r2) / len(r2):.3f}")
    if not options[1].steps:
        return ridge.projector
    train, choose = ([Lesson(d, prefix) for d in part] for part in (documents.train, documents.choose))
    found = distil(ridge.projector, *pair, (train, choose), options[1], console)
    console.print(f"distilled: held-out KL {found.kl_before:.3f} → {found.kl_after:.3f} at step {found.steps}")
    return found.projector


def _mlp(pair: Pair, documents: Documents, options: MlpOptions, console: Console) -> Projector:
    from moonpool.c2c.fitting.mlp import fit_mlp

    found = fit_mlp(*pair, documents, options, console)
    console.print(f"mlp: {found.epochs} epochs, held-out MSE {found.heldout_mse:.4f} of the outputs' variance")
    return found.projector
