"""`moonpool c2c eval`: a bundle judged on held-out text."""

from __future__ import annotations

from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.c2c.commands.common import (
    CONTINUATION,
    Folder,
    Held,
    Prefix,
    Seed,
    Texts,
    Work,
    fact_documents,
    long_documents,
    one_line,
    open_console,
    open_stores,
    split_texts,
)
from moonpool.errors import ConfigError

if TYPE_CHECKING:
    from moonpool.c2c.bundle import Bundle
    from moonpool.c2c.commands.common import Pair
    from moonpool.c2c.fitting.documents import Split
    from moonpool.c2c.judging.report import Report
    from moonpool.c2c.projectors.base import Projector


class Kind(Enum):
    TEXT = "text"
    CODE = "code"
    PROSE = "prose"
    CHAT = "chat"


class FactForm(Enum):
    LINES = "lines"
    SENTENCES = "sentences"
    CODE = "code"


class Compute(Enum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@one_line
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
    fact_form: Annotated[
        FactForm, typer.Option(help="lines `Ada: amber`, sentences, or assignments in code")
    ] = FactForm.LINES,
    checks: Annotated[int, typer.Option(min=0, help="documents for the measures that take many passes")] = 4,
    generate: Annotated[int, typer.Option(min=1, help="tokens of a greedy answer, for the retention")] = 32,
    kind: Annotated[
        Kind, typer.Option(help="of the texts; code, prose and chat go into reports of their own")
    ] = Kind.TEXT,
    compute: Annotated[Compute, typer.Option(help="arithmetic of both models")] = Compute.FLOAT32,
    out: Annotated[Path | None, typer.Option(help="folder for report.json, report.md and report.png")] = None,
    into_bundle: Annotated[bool, typer.Option("--into-bundle", help="put the report into the bundle")] = False,
    work: Work = None,
) -> None:
    """Judge a bundle on held-out text against the native cache and against controls.

    Texts of four times the prefix give the check at four times the length, where there are any among those held out.
    """
    import torch
    from msgspec.structs import replace
    from rich.console import Console

    from moonpool.c2c.bundle import WEIGHTS, add_files, open_bundle
    from moonpool.c2c.judging import evaluate as judge
    from moonpool.c2c.judging import report as reports

    console = open_console()
    pair = open_stores(source, target, work, dtype=getattr(torch, compute.value))
    parts = split_texts(pair, text, 0, seed, prefix, held)
    options = judge.EvalOptions(
        prefix=prefix,
        continuation=CONTINUATION,
        page_size=page_size,
        seed=seed,
        texts=tuple(parts.judged),
        kind=kind.value,
        fact_form=fact_form.value,
        checks=checks,
        generate=generate,
    )
    opened = open_bundle(bundle)
    other = _checked(open_bundle(compare), pair, page_size, parts) if compare else None
    evaluator = judge.Evaluator(*pair, _checked(opened, pair, page_size, parts), options, other)
    asked = fact_documents(pair, prefix, facts, seed, page_size, fact_form.value)
    long = long_documents(pair, text, set(parts.judged), options.long_tokens, checks, seed)
    found = replace(judge.evaluate(evaluator, parts.report, asked, console, long), weights=opened.sums[WEIGHTS])
    Console().print(reports.table(found))
    files = _files(found)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (out / name).write_bytes(content)
    if into_bundle:
        console.print(f"{bundle}: with the report, bundle {add_files(opened, files).digest}")


def _files(found: Report) -> dict[str, bytes]:
    """By the names that a bundle has for them; the page of plots where matplotlib is installed, for the main report."""
    from moonpool.c2c.judging import report as reports
    from moonpool.c2c.judging.page import page

    name = "report" if found.kind == "text" else f"report-{found.kind}"
    files = {f"{name}.json": reports.to_json(found), f"{name}.md": reports.markdown(found).encode()}
    if name == "report" and find_spec("matplotlib"):
        files["report.png"] = page(found)
    return files


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
