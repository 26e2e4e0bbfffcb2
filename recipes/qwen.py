"""The Qwen2.5-Coder pair's bundles: `python -m recipes.qwen --direction l2s` (1.5B → 0.5B) or `s2l` (back).

    documents (`material`) ─► KV of both models, bf16, kept ─► trunk in closed form ─► distillation through the target ─► bundle
                                                          └─► the baselines: issue #1520's mlp and a one-layer ridge, same tokens
    held-out files ─► reports on code (the main one), prose and chat ─► into the bundle

Everything follows from --seed. On two cores with bf16 units: captures 25 minutes, closed form 10, distillation 30 (l2s).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from moonpool import paths
from moonpool.c2c.bundle import Bundle, open_bundle, write_bundle
from moonpool.c2c.fitting.capture import CaptureStore, load_tokenizer
from moonpool.c2c.fitting.distil import DistilOptions, Lesson, Lessons, distil
from moonpool.c2c.fitting.gather import Documents
from moonpool.c2c.fitting.mlp import MlpOptions, fit_mlp
from moonpool.c2c.fitting.prepare import FitOptions
from moonpool.c2c.fitting.ridge import fit_linear
from moonpool.c2c.fitting.rounding import for_storage
from moonpool.c2c.fitting.trunk import fit_trunk
from moonpool.c2c.judging.report import Kind
from moonpool.c2c.projectors.base import Projector
from recipes.material import PREFIX, Material

LARGE, SMALL = "qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct"
TRAIN = {"code": 200, "prose": 100, "chat": 100, "facts": 80}
CHOOSE = 6
"""Held-out documents of each kind that choose λ and the step that is kept; the report's come behind them."""
REPORTED: tuple[Kind, ...] = ("code", "prose", "chat")
DATA = [
    "Python files of the standard library, sympy, networkx and numpy (recipes/material.py, training side)",
    "docstrings of the same and the chapters of Python's language reference",
    "conversations about both in the chat template",
    "generated facts",
]


@dataclass(frozen=True)
class Pair:
    """One direction: KV of both models, and the documents of both sides."""

    source: CaptureStore
    target: CaptureStore
    train: dict[str, list[Tensor]]
    choose: dict[str, list[Tensor]]
    held: Material

    @property
    def name(self) -> str:
        return f"{self.source.folder.name}-to-{self.target.folder.name}"

    @property
    def documents(self) -> Documents:
        return Documents(
            [d for kind in self.train.values() for d in kind], [d for k in self.choose.values() for d in k]
        )


def names(direction: str) -> tuple[str, str]:
    """(source, target) of `l2s` or `s2l`."""
    return (LARGE, SMALL) if direction == "l2s" else (SMALL, LARGE)


def open_pair(
    direction: str, seed: int, compute: torch.dtype = torch.bfloat16, train: dict[str, int] | None = None
) -> Pair:
    """`train`: documents of each kind; none for judging only."""
    folders = [paths.find_model(n) for n in names(direction)]
    kept = paths.cache_dir() / ("captures" if compute is torch.float32 else "captures-bf16")
    source, target = (CaptureStore(kept, f, compute) for f in folders)
    tokenizer = load_tokenizer(folders[1])
    taught, held = (Material(tokenizer, held=side, seed=seed) for side in (False, True))
    counts = TRAIN if train is None else train
    return Pair(
        source,
        target,
        {kind: taught.draw(kind, n) for kind, n in counts.items() if n},
        {kind: held.draw(kind, CHOOSE) for kind in TRAIN},
        held,
    )


def lessons(by_kind: dict[str, list[Tensor]]) -> dict[str, list[Lesson]]:
    """Facts are asked where their questions begin; anything else may be cut anywhere."""
    return {kind: [Lesson(d, PREFIX if kind == "facts" else None) for d in found] for kind, found in by_kind.items()}


def fit(pair: Pair, options: argparse.Namespace, console: Console) -> Projector:
    start = fit_trunk(pair.source, pair.target, pair.documents, FitOptions(rank=options.rank), console)
    console.print(f"trunk of rank {options.rank}, λ = {start.ridge:g}")
    found = distil(
        start.projector,
        pair.source,
        pair.target,
        Lessons(lessons(pair.train), lessons(pair.choose)),
        DistilOptions(steps=options.steps, batch=4, continuation=64, every=50, native_tokens=1, seed=options.seed),
        console,
        paths.cache_dir() / "runs" / pair.name,
    )
    console.print(f"distilled: held-out KL {found.kl_before:.3f} → {found.kl_after:.3f} at step {found.steps}")
    return found.projector


def baselines(pair: Pair, options: argparse.Namespace, console: Console) -> None:
    """Issue #1520's recipe and plain one-layer ridge, from the same tokens, into the cache folder."""
    ridge = fit_linear(pair.source, pair.target, pair.documents, FitOptions(layers_per_target=1), console).projector
    mlp = fit_mlp(
        pair.source,
        pair.target,
        pair.documents,
        MlpOptions(epochs=options.epochs, group=48, compute=torch.bfloat16, seed=options.seed),
        console,
    ).projector
    for label, made in (("ridge1", ridge), ("issue1520", mlp)):
        write(pair, paths.cache_dir() / "fits" / f"{pair.name}-{label}", made, options)


def write(pair: Pair, folder: Path, made: Projector, options: argparse.Namespace) -> Bundle:
    by = f"recipes/qwen.py --direction {options.direction} --seed {options.seed} --steps {options.steps} --rank {options.rank}"
    dtype: torch.dtype = getattr(torch, options.storage)
    kept = for_storage(made, pair.source, pair.documents.train, dtype)
    return write_bundle(
        folder, kept, pair.source.spec, pair.target.spec, dtype=dtype, training_data=DATA, created_by=by
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--direction", choices=("l2s", "s2l"), default="l2s")
    parser.add_argument("--out", type=Path, default=Path("bundles"))
    parser.add_argument("--rank", type=int, default=1536)
    parser.add_argument("--storage", default="int8", choices=("int8", "bfloat16"), help="of the weights")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=1, help="of the mlp baseline")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stages", default="fit,baselines,report", help="any of fit, baselines, report")
    return parser.parse_args()


def main() -> None:
    from recipes.judge import report

    options, console = parse(), Console(stderr=True)
    stages = options.stages.split(",")
    folder = options.out / names(options.direction)[0]
    if {"fit", "baselines"} & set(stages):
        pair = open_pair(options.direction, options.seed)
        if "fit" in stages:
            write(pair, options.out / pair.name, fit(pair, options, console), options)
        if "baselines" in stages:
            baselines(pair, options, console)
    if "report" in stages:
        pair = open_pair(options.direction, options.seed, torch.float32, {})
        folder = options.out / pair.name
        report(pair, open_bundle(folder), console)


if __name__ == "__main__":
    main()
