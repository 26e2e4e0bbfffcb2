"""Fit and judge the bundled projector: `python models/fit_bundles.py` writes bundles/moon-large-to-moon-small.

Ridge from several source layers, then distillation through moon-small; judged on held-out text and on fact documents made
of held-out text, beside issue #1520's mlp trained on the same documents. Minutes on two cores; everything follows from --seed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from models import corpus, tasks
from moonpool import paths
from moonpool.c2c.bundle import add_files, open_bundle, write_bundle
from moonpool.c2c.fitting.capture import CaptureStore, load_tokenizer
from moonpool.c2c.fitting.distil import DistilOptions, Lesson, Lessons, distil
from moonpool.c2c.fitting.facts import FactDocument, FactWriter
from moonpool.c2c.fitting.mlp import MlpOptions, fit_mlp
from moonpool.c2c.fitting.ridge import Documents, FitOptions, fit_linear
from moonpool.c2c.judging.evaluate import EvalOptions, Evaluator, evaluate
from moonpool.c2c.judging.report import Report, markdown, table, to_json
from moonpool.c2c.projectors.base import Projector

ROOT = Path(__file__).resolve().parents[1]
NAME = "moon-large-to-moon-small"
DATA = ["Python standard library documentation (training part)", "generated facts and chats"]
Pair: TypeAlias = tuple[CaptureStore, CaptureStore]
LENGTH, PREFIX, PAGE = 512, 448, 16
CHOOSE, REPORT, FACTS = 12, 24, 24


@dataclass(frozen=True)
class Material:
    """Documents of one seed. `dense` teach the ridge and the baseline, not the distillation; those of `choose`, `report` and
    `facts` hold only text that neither model was trained on."""

    train: list[Tensor]
    dense: list[Tensor]
    choose: list[Tensor]
    report: list[Tensor]
    facts: list[FactDocument]


def dense(generator: tasks.Generator, rng: np.random.Generator) -> Tensor:
    """Facts told again and again in changing order, a passage now and then: a name's code in the keys is learnt from many rows."""
    told = generator.pairs(rng, int(rng.integers(40, 88)))
    ids: list[int] = []
    while len(ids) < LENGTH:
        ids += [t for i in rng.permutation(len(told)) for t in (*told[i], generator.words.newline)]
        if rng.random() < 0.5:
            ids += [*generator.passage(rng, int(rng.integers(4, 60))), generator.words.newline]
    return torch.tensor(ids[:LENGTH])


def rows(generator: tasks.Generator, rng: np.random.Generator, count: int) -> list[Tensor]:
    """Documents in the forms that the pair is used with, most of them with facts: a map can only carry what its data shows, and
    of 512 tokens of plain text none tells one name's value from another's."""
    found = []
    for i in range(count):
        if i % 10 < 7:
            ids, _ = generator.facts_row(rng, LENGTH, filler=True)
        elif i % 10 == 7:
            ids, _ = generator.chat_row(rng, LENGTH)
        else:
            ids, _ = generator.text_row(rng, LENGTH)
        found.append(torch.from_numpy(ids.astype(np.int64)))
    return found


def material(tokenizer: Any, documents: int, seed: int) -> Material:
    train, held = corpus.texts(0)  # the models' own split, whatever the seed of the fit
    backend = tokenizer.backend_tokenizer
    words = corpus.Words.of(backend)
    middle = len(held) // 2
    ids = [corpus.encode_all(backend, part) for part in (train, held[:middle], held[middle:])]
    rng = np.random.default_rng([seed, 1520])
    fit, choose = (tasks.Generator(words, part) for part in ids[:2])
    last = torch.from_numpy(ids[2])
    report = [last[i * LENGTH : (i + 1) * LENGTH] for i in range(min(REPORT, len(last) // LENGTH))]
    lines = [line.strip() for text in held[middle:] for line in text.splitlines() if 20 < len(line.strip()) < 90]
    writer = FactWriter(tokenizer, sentences=random.Random(seed).sample(lines, min(400, len(lines))), seed=seed)
    facts = [writer.document(PREFIX, facts=12, questions=8, margin=PAGE) for _ in range(FACTS)]
    told = [dense(fit, rng) for _ in range(documents)]
    return Material(rows(fit, rng, documents), told, rows(choose, rng, CHOOSE), report, facts)


def lessons(documents: list[Tensor], seed: int) -> list[Lesson]:
    """Each document cut at a random whole page in its last two thirds."""
    rng = random.Random(seed)
    return [Lesson(d, PAGE * rng.randint(LENGTH // PAGE // 3, PREFIX // PAGE)) for d in documents]


def fit(options: argparse.Namespace, pair: Pair, m: Material, console: Console) -> Projector:
    documents = Documents([*m.train, *m.dense], m.choose)
    ridge = fit_linear(
        *pair,
        documents,
        FitOptions(layers_per_target=options.layers, window=0, shell=not options.no_shell, attention=options.attention),
        console,
    )
    r2 = {h: float(np.mean([f.r2 for f in ridge.layers if f.half == h])) for h in "kv"}
    console.print(f"ridge on {ridge.tokens} tokens: held-out R² of keys {r2['k']:.3f}, of values {r2['v']:.3f}")
    if not options.steps:
        return ridge.projector
    found = distil(
        ridge.projector,
        *pair,
        Lessons({"all": lessons(m.train, options.seed)}, {"all": lessons(m.choose, options.seed + 1)}),
        DistilOptions(
            steps=options.steps, batch=options.batch, learning_rate=options.rate, every=20, native_tokens=PAGE
        ),
        console,
    )
    console.print(f"distilled: held-out KL {found.kl_before:.3f} → {found.kl_after:.3f} nats at step {found.steps}")
    return found.projector


def judge(pair: Pair, m: Material, projector: Projector, other: Projector | None, seed: int) -> Report:
    options = EvalOptions(prefix=PREFIX, page_size=PAGE, seed=seed, texts=("held-out stdlib documentation",))
    return evaluate(Evaluator(*pair, projector, options, other), m.report, m.facts, Console(stderr=True))


def judge_folders(bundle: Path, baseline: Path, models: Path = ROOT / "models", seed: int = 0) -> Report:
    """The report on a bundle beside a second one, made anew (the benchmark's entry)."""
    with tempfile.TemporaryDirectory() as kept:
        source, target = _stores(Path(kept), models)
        m = material(load_tokenizer(target.folder), 0, seed)
        first, second = (open_bundle(b).projector() for b in (bundle, baseline))
        return judge((source, target), m, first, second, seed)


def _stores(kept: Path, models: Path) -> tuple[CaptureStore, CaptureStore]:
    return CaptureStore(kept, models / "moon-large"), CaptureStore(kept, models / "moon-small")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="folder with moon-large and moon-small")
    parser.add_argument("--out", type=Path, default=ROOT / "bundles", help="folder that gets the bundle")
    parser.add_argument(
        "--documents", type=int, default=240, help=f"documents of {LENGTH} tokens to fit on, and as many dense ones"
    )
    parser.add_argument("--layers", type=int, default=4, help="source layers for each target layer")
    parser.add_argument("--steps", type=int, default=120, help="distillation steps; 0 = ridge only")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=6, help="of the baseline, at most")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument(
        "--attention", type=float, default=0.9, help="how much attention weighs the ridge's rows, 0 to 1"
    )
    parser.add_argument("--keep-baseline", action="store_true", help="judge beside the baseline that is there")
    parser.add_argument("--no-shell", action="store_true", help="do not put mapped keys on the target's key shell")
    parser.add_argument(
        "--baseline",
        type=Path,
        default=paths.cache_dir() / "fits" / f"{NAME}-issue1520",
        help="folder that gets issue #1520's mlp, trained on the same documents",
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _baseline(options: argparse.Namespace, pair: Pair, m: Material, console: Console) -> Projector:
    if options.keep_baseline:
        return open_bundle(options.baseline).projector()
    found = fit_mlp(
        *pair, Documents([*m.train, *m.dense], m.choose), MlpOptions(seed=options.seed, epochs=options.epochs), console
    )
    console.print(f"mlp: {found.epochs} epochs, held-out MSE {found.heldout_mse:.3f} of the variance")
    return found.projector


def main() -> None:
    options, console = parse(), Console(stderr=True)
    torch.manual_seed(options.seed)
    with tempfile.TemporaryDirectory() as kept:
        source, target = pair = _stores(Path(kept), options.models)
        m = material(load_tokenizer(target.folder), options.documents, options.seed)
        projector = fit(options, pair, m, console)
        mlp = _baseline(options, pair, m, console)
        found = judge(pair, m, projector, mlp, options.seed)
    Console(width=110).print(table(found))
    by = f"models/fit_bundles.py --seed {options.seed} --steps {options.steps} --layers {options.layers}"
    for folder, made in ((options.out / NAME, projector), (options.baseline, mlp)):
        bundle = write_bundle(folder, made, source.spec, target.spec, training_data=DATA, created_by=by)
        bundle = add_files(bundle, {"report.json": to_json(found), "report.md": markdown(found).encode()})
        print(f"{folder.name}: bundle {bundle.digest}")


if __name__ == "__main__":
    main()
