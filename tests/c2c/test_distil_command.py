"""`moonpool c2c distil` from a bundle to a better one, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from moonpool.c2c.bundle import open_bundle, write_bundle
from moonpool.c2c.commands import app
from moonpool.c2c.fitting.distil_chats import chats
from moonpool.c2c.projectors import build_projector
from moonpool.c2c.signature import load_spec
from moonpool.errors import ConfigError
from tests.c2c.tiny import documents, text, tiny_model, tokenizer

TEMPLATE = "{% for m in messages %}<|end|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cli")
    large, small = tiny_model(root / "large", layers=2), tiny_model(root / "small", layers=2, dim=8, seed=1)
    (small / "chat_template.jinja").write_text(TEMPLATE)
    (root / "texts").mkdir()
    for i in range(12):
        (root / "texts" / f"{i:02}.txt").write_text(text(i, 220))
    shape = {"source_layers": 2, "source_width": 32, "target_layers": 2, "target_width": 16, "rank": 8}
    sizes = {"down.weight": (128, 8), "up.weight": (8, 64), "bias": (2, 2, 16)}
    generator = torch.Generator().manual_seed(0)
    made = {n: torch.randn(*s, generator=generator) / s[0] ** 0.5 for n, s in sizes.items()}
    write_bundle(
        root / "start",
        build_projector("trunk", shape, made),
        load_spec(large),
        load_spec(small),
        training_data=["some text"],
    )
    return root


def distil(place: Path, *own: str) -> tuple[int, str]:
    fixed = (
        f"--bundle {place}/start --source {place}/large --target {place}/small --text {place}/texts --work {place}/kept"
    )
    small = "--prefix 96 --held 2 --tokens 1024 --batch 2 --continuation 16 --folder"
    found = CliRunner().invoke(app, ["distil", *fixed.split(), *small.split(), f"{place}/runs", *own])
    return found.exit_code, found.output.replace("\n", "")


def test_a_bundle_becomes_a_better_one(place: Path) -> None:
    own = ["--steps", "4", "--every", "2", "--learning-rate", "0.02", "--chat-share", "0.4", "--facts", "2", "--plot"]
    code, shown = distil(place, "--out", f"{place}/made", *own)
    assert code == 0, shown
    assert "held-out KL" in shown
    made = open_bundle(place / "made")
    assert made.manifest.kind == "trunk"
    assert made.manifest.training_data[0] == "some text"
    assert made.manifest.training_data[-1] == "2 fact documents"
    (run,) = (place / "runs").iterdir()
    assert (run / "metrics.png").read_bytes()[:4] == b"\x89PNG"
    lines = (run / "metrics.csv").read_text().splitlines()
    assert lines[0] == "step,learning_rate,train_kl,held_kl,held_text,held_chat,held_facts,seconds"
    first, last = (float(lines[i].split(",")[3]) for i in (1, -1))
    assert last < first

    # Once more: nothing is left to do, and the same comes out.
    code, shown = distil(place, "--out", f"{place}/again", *own)
    assert (code, len(list((place / "runs").iterdir()))) == (0, 1)
    assert (run / "metrics.csv").read_text().splitlines() == lines
    before, after = (open_bundle(place / n).projector().tensors() for n in ("made", "again"))
    assert all(torch.equal(before[n], after[n]) for n in before)

    code, shown = distil(place, "--out", f"{place}/light", "--storage", "int8", *own)
    assert code == 0, shown
    assert load_file(place / "light" / "weights.safetensors")["down.weight"].dtype == torch.int8


def test_held_out_texts_must_not_have_been_fitted_on(place: Path) -> None:
    from moonpool.c2c.commands.common import open_stores, split_texts

    pair = open_stores(f"{place}/large", f"{place}/small", place / "kept")
    judged = split_texts(pair, [place / "texts"], 1024, 0, 96, 2).judged
    start = open_bundle(place / "start")
    write_bundle(place / "fitted", start.projector(), pair[0].spec, pair[1].spec, training_data=judged)
    code, shown = distil(place, "--bundle", f"{place}/fitted", "--out", f"{place}/never")
    assert code == 2
    assert "held out here" in shown
    assert not (place / "never").exists()


def test_chats_are_the_documents_in_the_targets_template() -> None:
    speaks, document = tokenizer(), documents(1, 64)[0]
    with pytest.raises(ConfigError, match="chat template"):
        chats([document], speaks)
    speaks.chat_template = TEMPLATE
    (made,) = chats([document], speaks)
    said = speaks.decode(made.tolist())
    assert len(made) == 64
    assert said.startswith("<|end|>user\n")
    assert "<|end|>assistant\n" in said
    assert speaks.decode(document[:16].tolist()) in said
