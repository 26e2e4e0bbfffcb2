"""`moonpool c2c`: fit a projector bundle, and judge one. Heavy imports stay inside the functions: the CLI starts fast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonpool import paths
from moonpool.errors import ConfigError, MoonpoolError

if TYPE_CHECKING:
    from rich.console import Console

    from moonpool.c2c.bundle import Bundle
    from moonpool.c2c.capture import CaptureStore
    from moonpool.c2c.distil import DistilOptions
    from moonpool.c2c.documents import Split
    from moonpool.c2c.facts import FactDocument
    from moonpool.c2c.fit import Documents, FitOptions
    from moonpool.c2c.fit_mlp import MlpOptions
    from moonpool.c2c.projectors.base import Projector
    from moonpool.c2c.projectors.linear import LinearProjector

    Pair = tuple[CaptureStore, CaptureStore]

app = typer.Typer(help="Cross-model KV: fit a projector bundle, and judge one.", no_args_is_help=True)

Folder = Annotated[str, typer.Option(help="model folder, or its name under MOONPOOL_MODELS")]
Texts = Annotated[
    list[Path], typer.Option("--text", help="text file; repeat, or give a folder of .txt, .md and .py files")
]
Work = Annotated[Path | None, typer.Option(help="folder that keeps KV captures [default: <cache>/captures]")]
Tokens = Annotated[int, typer.Option(min=1024, help="tokens to fit on")]
Held = Annotated[int, typer.Option(min=2, help="held-out documents")]
Prefix = Annotated[int, typer.Option(min=32, help="tokens of prefix in a held-out document")]
Seed = Annotated[int, typer.Option(help="decides which files are held out; give fit's seed to eval")]
_CONTINUATION = 63
_CHOOSE = 6
_OTHER_FACTS = 1 << 20
"""Added to the seed: fit's fact documents are never eval's."""
_SUFFIXES = (".txt", ".md", ".py", ".rst")


class Kind(Enum):
    LINEAR = "linear"
    MLP = "mlp"


def _one_line(command: Callable[..., None]) -> Callable[..., None]:
    """A MoonpoolError becomes one line on stderr and exit code 2."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except MoonpoolError as e:
            typer.echo(f"error: {e}", err=True)
            raise typer.Exit(2) from e

    return run


@app.command()
@_one_line
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
    from moonpool.c2c.distil import DistilOptions
    from moonpool.c2c.fit import Documents, FitOptions
    from moonpool.c2c.fit_mlp import MlpOptions

    console, pair = _console(), _stores(source, target, work)
    parts = _split(pair, text, tokens, seed, prefix, held)
    asked = _facts(pair, prefix, facts, seed + _OTHER_FACTS)
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


@app.command("eval")
@_one_line
def evaluate(
    bundle: Annotated[Path, typer.Option(help="bundle folder to judge")],
    source: Folder,
    target: Folder,
    text: Texts,
    compare: Annotated[Path | None, typer.Option(help="second bundle, judged side by side")] = None,
    page_size: Annotated[int, typer.Option(min=1)] = 16,
    prefix: Prefix = 448,
    seed: Seed = 0,
    held: Held = 12,
    facts: Annotated[int, typer.Option(min=0, help="fact documents")] = 8,
    out: Annotated[Path | None, typer.Option(help="folder for report.json and report.md")] = None,
    into_bundle: Annotated[bool, typer.Option("--into-bundle", help="put the report into the bundle")] = False,
    work: Work = None,
) -> None:
    """Judge a bundle on held-out text against the native cache and against controls."""
    from rich.console import Console

    from moonpool.c2c import evaluate as judge
    from moonpool.c2c import report as reports
    from moonpool.c2c.bundle import add_files, open_bundle

    console = _console()
    pair = _stores(source, target, work)
    parts = _split(pair, text, 0, seed, prefix, held)
    options = judge.EvalOptions(
        prefix=prefix, continuation=_CONTINUATION, page_size=page_size, seed=seed, texts=tuple(parts.judged)
    )
    opened = open_bundle(bundle)
    other = _checked(open_bundle(compare), pair, page_size, parts) if compare else None
    evaluator = judge.Evaluator(*pair, _checked(opened, pair, page_size, parts), options, other)
    found = judge.evaluate(evaluator, parts.report, _facts(pair, prefix, facts, seed, page_size), console)
    Console().print(reports.table(found))
    files = {"report.json": reports.to_json(found), "report.md": reports.markdown(found).encode()}
    if out:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (out / name).write_bytes(content)
    if into_bundle:
        console.print(f"{bundle}: with the report, bundle {add_files(opened, files).digest}")


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _files(text: list[Path]) -> list[Path]:
    """Files as given; a folder stands for the text files in it."""
    return [f for p in text for f in (sorted(c for c in p.iterdir() if c.suffix in _SUFFIXES) if p.is_dir() else [p])]


def _stores(source: str, target: str, work: Path | None) -> Pair:
    """Captures of both models. Raises ConversionRefused if they do not share a tokenizer."""
    from moonpool.c2c.capture import CaptureStore
    from moonpool.c2c.signature import check_pair

    folder = work or paths.cache_dir() / "captures"
    pair = CaptureStore(folder, paths.find_model(source)), CaptureStore(folder, paths.find_model(target))
    check_pair(pair[0].spec, pair[1].spec)
    return pair


def _split(pair: Pair, text: list[Path], tokens: int, seed: int, prefix: int, held: int) -> Split:
    from moonpool.c2c.capture import load_tokenizer
    from moonpool.c2c.documents import read_texts, split

    length = prefix + _CONTINUATION + 1
    texts = read_texts(_files(text))
    tokenizer = load_tokenizer(pair[1].folder)
    return split(texts, tokenizer, length=length, train_tokens=tokens, choose=_CHOOSE, report=held, seed=seed)


def _facts(pair: Pair, prefix: int, count: int, seed: int, page_size: int = 16) -> list[FactDocument]:
    """Fact documents of `prefix` tokens, the first page and the end free of facts."""
    from moonpool.c2c.capture import load_tokenizer
    from moonpool.c2c.facts import FactWriter

    writer = FactWriter(load_tokenizer(pair[1].folder), seed=seed)
    lines = max(2, min(12, prefix // 32))
    return [writer.document(prefix, facts=lines, margin=max(16, page_size)) for _ in range(count)]


def _checked(bundle: Bundle, pair: Pair, page_size: int, parts: Split) -> Projector:
    """The bundle's projector. Raises ConversionRefused (other models), ConfigError (it was fitted on what would judge it)."""
    bundle.check(pair[0].spec, pair[1].spec, page_size)
    seen = set(bundle.manifest.training_data) & set(parts.judged)
    if seen:
        raise ConfigError(
            "the bundle was fitted on held-out texts",
            key=str(bundle.folder),
            have=", ".join(sorted(seen)[:3]),
            fix="Give eval the same --text, --seed, --prefix and --held as fit, or other texts.",
        )
    return bundle.projector()


def _linear(
    pair: Pair, documents: Documents, options: tuple[FitOptions, DistilOptions], prefix: int, console: Console
) -> LinearProjector:
    """The ridge, then as many distillation steps as asked for."""
    from moonpool.c2c.distil import Lesson, distil
    from moonpool.c2c.fit import fit_linear

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
    from moonpool.c2c.fit_mlp import fit_mlp

    found = fit_mlp(*pair, documents, options, console)
    console.print(f"mlp: {found.epochs} epochs, held-out MSE {found.heldout_mse:.4f} of the outputs' variance")
    return found.projector
