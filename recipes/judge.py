"""Reports on a Qwen bundle: held-out code (with facts; the main report), prose and chat, put into the bundle."""

from __future__ import annotations

from msgspec.structs import replace
from rich.console import Console

from moonpool.c2c.bundle import WEIGHTS, Bundle, add_files
from moonpool.c2c.judging.evaluate import EvalOptions, Evaluator, evaluate
from moonpool.c2c.judging.page import page
from moonpool.c2c.judging.report import Kind, Report, markdown, table, to_json
from moonpool.c2c.projectors.base import Projector
from recipes.material import PREFIX
from recipes.qwen import CHOOSE, REPORTED, Pair

DOCUMENTS, FACTS, LONG = 12, 8, 2


def judge(
    pair: Pair,
    kind: Kind,
    projector: Projector,
    other: Projector | None = None,
    documents: int = DOCUMENTS,
    facts: int = 0,
) -> Report:
    """The evaluator's findings on documents of one kind that neither training nor choosing has seen."""
    found = pair.held.draw(kind, CHOOSE + documents)[CHOOSE:]
    options = EvalOptions(prefix=PREFIX, texts=(f"held-out {kind}, recipes/material.py",), kind=kind)
    evaluator = Evaluator(pair.source, pair.target, projector, options, other)
    long = pair.held.long(LONG, options.long_tokens) if kind == "code" else []
    return evaluate(evaluator, found, pair.held.facts(facts), Console(stderr=True), long)


def report(pair: Pair, bundle: Bundle, console: Console) -> Bundle:
    """Judge and put the reports into the bundle; prints a table each."""
    files: dict[str, bytes] = {}
    for kind in REPORTED:
        main = kind == REPORTED[0]
        found = judge(pair, kind, bundle.projector(), facts=FACTS if main else 0)
        found = replace(found, weights=bundle.sums[WEIGHTS])
        console.print(table(found))
        name = "report" if main else f"report-{kind}"
        files |= {f"{name}.json": to_json(found), f"{name}.md": markdown(found).encode()}
        files |= {"report.png": page(found)} if main else {}
    return add_files(bundle, files)
