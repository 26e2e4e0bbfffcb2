"""`moonpool c2c fit` and `eval` from text files to a bundle with its report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonpool.c2c.bundle import open_bundle
from moonpool.c2c.commands import app
from moonpool.c2c.judging.report import read_report
from tests.c2c.tiny import text, tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cli")
    tiny_model(root / "large", layers=4)
    tiny_model(root / "small", layers=2, dim=8, seed=1)
    (root / "texts").mkdir()
    for i in range(14):
        (root / "texts" / f"{i:02}.txt").write_text(text(i))
    return root


def arguments(place: Path, *own: str) -> list[str]:
    models = ["--source", f"{place}/large", "--target", f"{place}/small"]
    return [*own, *models, "--text", f"{place}/texts", "--work", f"{place}/kept", "--prefix", "96", "--held", "2"]


def run(place: Path, *own: str) -> str:
    result = CliRunner().invoke(app, arguments(place, *own))
    assert result.exit_code == 0, result.output
    return result.output


def test_fit_then_eval_side_by_side(place: Path) -> None:
    run(
        place,
        "fit",
        "--out",
        f"{place}/linear",
        "--tokens",
        "1024",
        "--layers-per-target",
        "2",
        "--steps",
        "2",
        "--facts",
        "1",
    )
    run(place, "fit", "--out", f"{place}/mlp", "--tokens", "1024", "--kind", "mlp", "--epochs", "2")
    assert open_bundle(place / "linear").manifest.kind == "linear"
    shown = run(
        place, "eval", "--bundle", f"{place}/linear", "--compare", f"{place}/mlp", "--facts", "1", "--out", f"{place}/o",
        "--into-bundle",
    )  # fmt: skip
    assert "wrong_document" in shown
    report = read_report(place / "linear" / "report.json")
    assert report == read_report(place / "o" / "report.json")
    assert {"native", "mapped", "compare", "no_context"} <= {a.name for a in report.arms}
    assert report.protocol.documents == 2
    assert report.by_length
    assert report.turns
    assert report.generation_retention is not None
    assert (place / "o" / "report.png").read_bytes().startswith(b"\x89PNG")
    run(
        place, "eval", "--bundle", f"{place}/linear", "--facts", "1", "--kind", "code", "--compute", "bfloat16", "--checks", "0",
        "--fact-form", "code", "--into-bundle",
    )  # fmt: skip
    other = read_report(place / "linear" / "report-code.json")
    assert (other.kind, other.protocol.compute, other.by_length) == ("code", "bfloat16", [])
    assert (report.protocol.fact_form, other.protocol.fact_form) == ("lines", "code")
    assert open_bundle(place / "linear").sums["report.json"]  # the main report stays


def test_the_bundled_pair_is_judged_with_all_blocks(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(9):  # two are held out, six are fit's to choose by, and one is left
        (tmp_path / "texts" / f"{i}.txt").write_text(text(i, words=700))
    models = ["--source", f"{ROOT}/models/moon-large", "--target", f"{ROOT}/models/moon-small"]
    result = CliRunner().invoke(
        app,
        [
            "eval", *models, "--bundle", f"{ROOT}/bundles/moon-large-to-moon-small", "--text", f"{tmp_path}/texts",
            "--work", f"{tmp_path}/kept", "--out", f"{tmp_path}/out", "--prefix", "64", "--held", "2", "--facts", "1",
            "--checks", "1", "--generate", "4",
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == ["report.json", "report.md", "report.png"]
    found = read_report(tmp_path / "out" / "report.json")
    p = found.protocol
    assert (p.documents, p.fact_documents, p.long_documents, p.generated_tokens) == (2, 1, 1, 4)
    assert {"mapped", "tail16", "source", "shuffled_keys", "wrong_mapped", "zeros"} <= {a.name for a in found.arms}
    assert len(found.arm("mapped").attention_cosine) == len(found.r2_k) == len(found.r2_v) == 5
    assert [c.tokens for c in found.by_length] == [32, 64]
    assert found.long
    assert found.long.tokens == 256
    assert found.by_position[-1].end == p.continuation_tokens
    assert found.turns
    assert found.generation_retention is not None
    assert 0 < found.flops_per_token < found.prefill_flops_per_token
    assert found.weights == open_bundle(ROOT / "bundles/moon-large-to-moon-small").sums["weights.safetensors"]
    told = (tmp_path / "out" / "report.md").read_text()
    for block in ("R² of keys", "tokens behind the prefix", "| 256 | 1 |", "KL by turn", "Greedy answers", "MFLOP"):
        assert block in told


@pytest.mark.parametrize("variant", ["head-local", "trunk", "look-back"])
def test_variants_are_bundles_that_can_be_judged(place: Path, variant: str) -> None:
    shown = run(place, "fit", "--out", f"{place}/{variant}", "--tokens", "1024", "--variant", variant, "--rank", "16")
    assert "error: of the attention output" in shown
    made = open_bundle(place / variant)
    assert made.manifest.kind == variant.replace("-", "")
    run(place, "eval", "--bundle", f"{place}/{variant}", "--facts", "1", "--checks", "0")


def test_a_second_fit_may_ask_for_other_things(place: Path) -> None:
    shown = run(
        place, "fit", "--out", f"{place}/second", "--tokens", "1024", "--repair-values", "--attention", "0.5",
        "--ridge", "1e-3", "--choose", "residual",
    )  # fmt: skip
    assert "GB at most" in shown
    for wrong in (["--memory", "0.000001"], ["--variant", "trunk", "--steps", "1"]):
        result = CliRunner().invoke(app, arguments(place, "fit", "--out", f"{place}/none", "--tokens", "1024", *wrong))
        assert result.exit_code == 2, result.output
        assert not (place / "none").exists()


def test_a_bundle_is_not_judged_on_what_it_was_fitted_on(place: Path) -> None:
    run(place, "fit", "--out", f"{place}/seeded", "--tokens", "1024", "--layers-per-target", "1")
    result = CliRunner().invoke(app, arguments(place, "eval", "--bundle", f"{place}/seeded", "--seed", "1"))
    assert result.exit_code == 2
    assert "fitted on held-out texts" in result.output


def test_errors_are_one_line_and_code_two(place: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, arguments(place, "eval", "--bundle", f"{tmp_path}/none"))
    assert result.exit_code == 2
    assert "no bundle here" in result.output
    assert "Traceback" not in result.output


def test_the_commands_import_nothing_heavy() -> None:
    code = "import sys, moonpool.c2c.commands; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
