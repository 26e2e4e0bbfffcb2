"""Reports on a Qwen bundle: held-out code (with facts; the main report), prose and chat, put into the bundle."""

from __future__ import annotations

from rich.console import Console

from moonpool.c2c.bundle import Bundle, add_files
from moonpool.c2c.judging.evaluate import EvalOptions, Evaluator, evaluate
from moonpool.c2c.judging.report import Report, markdown, table, to_json
from moonpool.c2c.projectors.base import Projector
from recipes.material import PREFIX
from recipes.qwen import CHOOSE, REPORTED, Pair

DOCUMENTS, FACTS = 12, 8


def judge(
    pair: Pair,
    kind: str,
    projector: Projector,
    other: Projector | None = None,
    documents: int = DOCUMENTS,
    facts: int = 0,
) -> Report:
    """The evaluator's findings on documents of one kind that neither training nor choosing has seen."""
    found = pair.held.draw(kind, CHOOSE + documents)[CHOOSE:]
    options = EvalOptions(prefix=PREFIX, texts=(f"held-out {kind}, recipes/material.py",))
    evaluator = Evaluator(pair.source, pair.target, projector, options, other)
    return evaluate(evaluator, found, pair.held.facts(facts), Console(stderr=True))


def report(pair: Pair, bundle: Bundle, console: Console) -> Bundle:
    """Judge and put the reports into the bundle; prints a table each."""
    files: dict[str, bytes] = {}
    for kind in REPORTED:
        main = kind == REPORTED[0]
        found = judge(pair, kind, bundle.projector(), facts=FACTS if main else 0)
        console.print(table(found))
        name = "report" if main else f"report-{kind}"
        files |= {f"{name}.json": to_json(found), f"{name}.md": markdown(found).encode()}
    return add_files(bundle, files)
