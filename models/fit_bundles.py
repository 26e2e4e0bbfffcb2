"""Fit and judge the bundled projectors: `python models/fit_bundles.py` writes bundles/moon-large-to-moon-small, with `--back` the
other direction.

A look-back trunk in closed form (then distillation through the target, if asked); judged on held-out text and on fact documents made
of held-out text. The baselines on the same documents go into the cache folder: issue #1520's mlp and a one-layer ridge.
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

import msgspec
import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from models import corpus, tasks
from moonpool import paths
from moonpool.c2c.bundle import WEIGHTS, Bundle, add_files, write_bundle
from moonpool.c2c.fitting.capture import CaptureStore, load_tokenizer
from moonpool.c2c.fitting.distil import DistilOptions, Lesson, Lessons, distil
from moonpool.c2c.fitting.facts import FactDocument, FactWriter
from moonpool.c2c.fitting.gather import Documents
from moonpool.c2c.fitting.lookback import fit_lookback
from moonpool.c2c.fitting.mlp import MlpOptions, fit_mlp
from moonpool.c2c.fitting.prepare import FitOptions
from moonpool.c2c.fitting.ridge import fit_linear
from moonpool.c2c.fitting.rounding import for_storage
from moonpool.c2c.judging.evaluate import LONG, EvalOptions, Evaluator, evaluate
from moonpool.c2c.judging.page import page
from moonpool.c2c.judging.report import Report, markdown, table, to_json
from moonpool.c2c.projectors.base import Projector

ROOT = Path(__file__).resolve().parents[1]
DATA = ["Python standard library documentation (training part)", "generated facts and chats"]
Pair: TypeAlias = tuple[CaptureStore, CaptureStore]
LENGTH, PREFIX, PAGE = 512, 448, 16
CHOOSE, REPORT, FACTS, CHECKS = 12, 24, 24, 4


@dataclass(frozen=True)
class Material:
    """Documents of one seed. `dense` teach the ridge and the baseline, not the distillation; those of `choose`, `report` and
    `facts` hold only text that neither model was trained on."""

    train: list[Tensor]
    dense: list[Tensor]
    choose: list[Tensor]
    report: list[Tensor]
    long: list[Tensor]
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


def rows(generator: tasks.Generator, rng: np.random.Generator, count: int, writer: FactWriter) -> list[Tensor]:
    """Documents in the forms that the pair is used with, most of them with facts: a map can only carry what its data shows, and
    of 512 tokens of plain text none tells one name's value from another's."""
    found: list[Tensor] = []
    while (i := len(found)) < count:
        if i % 10 < 2:
            told = writer.document(PREFIX, facts=12, questions=24, margin=PAGE).told()
            found.append(told[:LENGTH])
            continue
        if i % 10 < 6:
            ids, _ = generator.facts_row(rng, LENGTH, filler=True)
        elif i % 10 == 6:
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
    teller, chooser, writer = (
        FactWriter(tokenizer, sentences=sentences(part, seed), seed=seed + i)
        for i, part in ((1000, train), (2000, held[:middle]), (0, held[middle:]))
    )
    facts = [writer.document(PREFIX, facts=12, questions=8, margin=PAGE) for _ in range(FACTS)]
    told = [dense(fit, rng) for _ in range(documents)]
    length = LONG * PREFIX + LENGTH - PREFIX
    long = [last[i * length : (i + 1) * length] for i in range(min(CHECKS, len(last) // length))]
    return Material(rows(fit, rng, documents, teller), told, rows(choose, rng, CHOOSE, chooser), report, long, facts)


def sentences(texts: list[str], seed: int) -> list[str]:
    """Lines that stand between facts."""
    lines = [line.strip() for text in texts for line in text.splitlines() if 20 < len(line.strip()) < 90]
    return random.Random(seed).sample(lines, min(400, len(lines)))


def lessons(documents: list[Tensor], seed: int) -> list[Lesson]:
    """Each document cut at a random whole page in its last two thirds."""
    rng = random.Random(seed)
    return [Lesson(d, PAGE * rng.randint(LENGTH // PAGE // 3, PREFIX // PAGE)) for d in documents]


def fit(options: argparse.Namespace, pair: Pair, m: Material, console: Console) -> Projector:
    documents = Documents([*m.train, *m.dense], m.choose)
    chosen = FitOptions(rank=options.rank, code=options.code, page_size=PAGE, shell=True, seed=options.seed)
    start = fit_lookback(*pair, documents, chosen, console)
    console.print(f"closed form: λ = {start.ridge:g}")
    if not options.steps:
        return start.projector
    found = distil(
        start.projector,
        *pair,
        Lessons({"all": lessons(m.train, options.seed)}, {"all": lessons(m.choose, options.seed + 1)}),
        DistilOptions(
            steps=options.steps,
            batch=options.batch,
            continuation=64,
            learning_rate=options.rate,
            native_tokens=PAGE,
            compute="float32",
        ),
        console,
    )
    console.print(f"distilled: held-out KL {found.kl_before:.3f} → {found.kl_after:.3f} nats at step {found.steps}")
    return found.projector


def judge_one(projector: Projector, source: str, target: str, seed: int = 0, models: Path = ROOT / "models") -> Report:
    """The report on one projector between two of the bundled models, made anew (the benchmark's entry)."""
    with tempfile.TemporaryDirectory() as kept:
        pair = _stores(Path(kept), models, (source, target))
        return judge(pair, material(load_tokenizer(pair[1].folder), 0, seed), projector, None, seed)


def _stores(kept: Path, models: Path, names: tuple[str, str]) -> Pair:
    return CaptureStore(kept, models / names[0]), CaptureStore(kept, models / names[1])


def judge(pair: Pair, m: Material, projector: Projector, other: Projector | None, seed: int) -> Report:
    options = EvalOptions(prefix=PREFIX, page_size=PAGE, seed=seed, texts=("held-out stdlib documentation",))
    return evaluate(Evaluator(*pair, projector, options, other), m.report, m.facts, Console(stderr=True), m.long)


def baselines(options: argparse.Namespace, pair: Pair, m: Material, console: Console) -> dict[str, Projector]:
    """Other maps, from the same documents."""
    documents = Documents([*m.train, *m.dense], m.choose)
    mlp = fit_mlp(*pair, documents, MlpOptions(seed=options.seed, epochs=options.epochs), console)
    console.print(f"mlp: {mlp.epochs} epochs, held-out MSE {mlp.heldout_mse:.3f} of the variance")
    ridge = fit_linear(*pair, documents, FitOptions(layers_per_target=1, window=0), console)
    return {"issue1520": mlp.projector, "ridge1": ridge.projector}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="folder with moon-large and moon-small")
    parser.add_argument("--out", type=Path, default=ROOT / "bundles", help="folder that gets the bundle")
    parser.add_argument("--back", action="store_true", help="moon-small → moon-large")
    parser.add_argument(
        "--documents", type=int, default=240, help=f"documents of {LENGTH} tokens to fit on, and as many dense ones"
    )
    parser.add_argument("--rank", type=int, default=448, help="width of the latent")
    parser.add_argument("--code", type=int, default=1536, help="width of the token's code")
    parser.add_argument("--steps", type=int, default=0, help="distillation steps behind the closed form")
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--rate", type=float, default=4e-4, help="of distillation, in RMS of each tensor")
    parser.add_argument("--epochs", type=int, default=6, help="of the mlp, at most")
    parser.add_argument("--only", choices=("bundle", "baselines"), help="the other is left as it is")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options, console = parse(), Console(stderr=True)
    torch.manual_seed(options.seed)
    names = ("moon-small", "moon-large") if options.back else ("moon-large", "moon-small")
    by = f"models/fit_bundles.py --seed {options.seed} --steps {options.steps} --rank {options.rank} --code {options.code}"
    label = "-to-".join(names)
    with tempfile.TemporaryDirectory() as kept:
        source, target = pair = _stores(Path(kept), options.models, names)
        m = material(load_tokenizer(target.folder), options.documents, options.seed)
        specs = source.spec, target.spec
        if options.only != "baselines":
            made = for_storage(fit(options, pair, m, console), source, m.train, torch.bfloat16)
            bundle = write_bundle(options.out / label, made, *specs, training_data=DATA, created_by=by)
            found = judge(pair, m, bundle.projector(), None, options.seed)
            Console(width=110).print(table(found))
            print(f"{label}: bundle {add_report(bundle, found).digest}")
        if options.only != "bundle":
            for name, other in baselines(options, pair, m, console).items():
                folder = paths.cache_dir() / "fits" / f"{label}-{name}"
                print(
                    f"{folder.name}: bundle {write_bundle(folder, other, *specs, training_data=DATA, created_by=by).digest}"
                )


def add_report(bundle: Bundle, found: Report) -> Bundle:
    """The bundle with its report, which names the weights that it speaks of."""
    bound = msgspec.structs.replace(found, weights=bundle.sums[WEIGHTS])
    files = {"report.json": to_json(bound), "report.md": markdown(bound).encode(), "report.png": page(bound)}
    return add_files(bundle, files)


if __name__ == "__main__":
    main()
