"""`moonpool c2c eval`: a bundle judged on held-out text."""

from __future__ import annotations

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
    from moonpool.c2c.projectors.base import Projector


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
    out: Annotated[Path | None, typer.Option(help="folder for report.json and report.md")] = None,
    into_bundle: Annotated[bool, typer.Option("--into-bundle", help="put the report into the bundle")] = False,
    work: Work = None,
) -> None:
    """Judge a bundle on held-out text against the native cache and against controls."""
    from msgspec.structs import replace
    from rich.console import Console

    from moonpool.c2c.bundle import WEIGHTS, add_files, open_bundle
    from moonpool.c2c.judging import evaluate as judge
    from moonpool.c2c.judging import report as reports

    console = open_console()
    pair = open_stores(source, target, work)
    parts = split_texts(pair, text, 0, seed, prefix, held)
    options = judge.EvalOptions(
        prefix=prefix, continuation=CONTINUATION, page_size=page_size, seed=seed, texts=tuple(parts.judged)
    )
    opened = open_bundle(bundle)
    other = _checked(open_bundle(compare), pair, page_size, parts) if compare else None
    evaluator = judge.Evaluator(*pair, _checked(opened, pair, page_size, parts), options, other)
    found = judge.evaluate(evaluator, parts.report, fact_documents(pair, prefix, facts, seed, page_size), console)
    found = replace(found, weights=opened.sums[WEIGHTS])
    Console().print(reports.table(found))
    files = {"report.json": reports.to_json(found), "report.md": reports.markdown(found).encode()}
    if out:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (out / name).write_bytes(content)
    if into_bundle:
        console.print(f"{bundle}: with the report, bundle {add_files(opened, files).digest}")


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
