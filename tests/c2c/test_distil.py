"""Distillation lowers the KL, starts from the projector that it is given, and never gives a worse one back."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

from moonpool.c2c.fitting.capture import CaptureStore, concat
from moonpool.c2c.fitting.distil import Distilled, DistilOptions, Lesson, Lessons, distil
from moonpool.c2c.fitting.distil_class import Classroom
from moonpool.c2c.fitting.distil_inputs import Inputs
from moonpool.c2c.fitting.distil_lessons import Cut
from moonpool.c2c.fitting.distil_pupils import pupil_of
from moonpool.c2c.fitting.distil_record import METRICS, STATE
from moonpool.c2c.fitting.distil_target import FrozenTarget
from moonpool.c2c.fitting.features import kv_of, rows
from moonpool.c2c.projectors import build_projector
from moonpool.c2c.projectors.base import Projector
from moonpool.c2c.projectors.identity import IdentityParameters, IdentityProjector
from moonpool.errors import ConfigError, ConversionError, ConversionRefused
from tests.c2c.tiny import documents, tiny_model

QUIET = Console(quiet=True)
Stores = tuple[CaptureStore, CaptureStore]
CPU = torch.device("cpu")
OPTIONS = DistilOptions(
    steps=6, batch=2, learning_rate=2e-2, warm_up=2, every=2, prefix_range=(32, 48), native_tokens=4, compute="float32"
)
SOURCE = {"source_layers": 3, "source_width": 32, "target_layers": 2, "target_width": 16}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {**SOURCE, "sources": [[[0, 1], [1]], [[2], [1, 2]]]},
    "linear shell": {**SOURCE, "sources": [[[0], [0]], [[2], [2]]], "shell_dim": 8},
    "trunk": {**SOURCE, "rank": 12},
    "trunk shell": {**SOURCE, "rank": 12, "shell_dim": 8},
    "coded shell": {**SOURCE, "rank": 12, "shell_dim": 8, "code": 20},
    "lookback shell": {**SOURCE, "rank": 12, "shell_dim": 8, "code": 20, "page_size": 4},
    "headlocal": {**SOURCE, "heads": 2, "sources": [[[[0, 1], [1, 2]]] * 2, [[[2], [0]]] * 2]},
    "mlp": {**SOURCE, "hidden": 12, "sources": [1, 2]},
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    root = tmp_path_factory.mktemp("distil")
    large, small = tiny_model(root / "large", layers=3, dim=16), tiny_model(root / "small", layers=2, dim=8, seed=1)
    return CaptureStore(root / "kept", large), CaptureStore(root / "kept", small)


def shapes(kind: str, p: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of the tensors that a projector with these parameters holds."""
    layers, width, x = p["target_layers"], p["target_width"], 2 * p["source_width"]
    bias = {"bias": (layers, 2, width)} | ({"shell": (layers, p["shell_dim"])} if "shell_dim" in p else {})
    match kind:
        case "trunk":
            down, up = (p["source_layers"] * x, p["rank"]), (p["rank"], layers * 2 * width)
            return {"down.weight": down, "up.weight": up, **bias}
        case "coded":
            code = {"code.weight": (x, p["code"]), "code.offset": (p["code"],), "read.weight": (p["code"], p["rank"])}
            return {**shapes("trunk", p), **code}
        case "lookback":
            return {**shapes("coded", p), "code.blank": (p["code"],), "back.weight": (p["code"], p["rank"])}
        case "mlp":
            sizes = [p["source_width"], p["hidden"], p["hidden"], width]
            weights = {f"{i}.weight": (layers, 2, sizes[i - 1], sizes[i]) for i in (1, 2, 3)}
            return {**weights, **{f"{i}.bias": (layers, 2, sizes[i]) for i in (1, 2, 3)}, "gate": (layers, 2)}

    def of(reads: Any) -> tuple[int, ...]:
        if kind == "headlocal":
            return p["heads"], len(reads[0]) * x // p["heads"], width // p["heads"]
        return len(reads) * x, width

    return {f"layers.{t}.{'kv'[h]}.weight": of(p["sources"][t][h]) for t in range(layers) for h in (0, 1)} | bias


def projector(case: str = "trunk") -> Projector:
    """Random weights of about the size that keeps KV's."""
    kind, parameters, generator = case.split()[0], KINDS[case], torch.Generator().manual_seed(3)
    made = {
        n: torch.randn(*s, generator=generator) / math.sqrt(s[-min(2, len(s))])
        for n, s in shapes(kind, parameters).items()
    }
    return build_projector(kind, parameters, made)


def lessons(count: int = 4) -> Lessons:
    """Random models share nothing that carries over to other documents: judged on the lessons themselves."""
    found = documents(count, 64)
    both = {"chat": [Lesson(d, 40) for d in found[: count // 2]], "text": [Lesson(d) for d in found[count // 2 :]]}
    return Lessons(both, both)


def options(**changes: Any) -> DistilOptions:
    return msgspec.structs.replace(OPTIONS, continuation=12, held_continuation=16, **changes)


def run(stores: Stores, o: DistilOptions, folder: Path | None = None, start: Projector | None = None) -> Distilled:
    return distil(start or projector(), *stores, lessons(), o, QUIET, folder)


def classroom(
    stores: Stores, made: Projector, native: int = 4, tail: int = 0, fading: float = 0.0
) -> tuple[Classroom, Inputs]:
    inputs = Inputs(made, stores[0])
    frozen = FrozenTarget(stores[1].folder, torch.float32, CPU, checkpointing=False)
    return Classroom(inputs, inputs.scale(documents(2, 64)), stores[1], frozen, native, tail, fading), inputs


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("case", sorted(KINDS))
def test_a_pupil_computes_and_gives_back_what_its_projector_does(stores: Stores, case: str, rank: int) -> None:
    made = projector(case)
    inputs = Inputs(made, stores[0])
    scale, tokens = inputs.scale(documents(2, 64)), documents(1, 64)[0]
    pupil = pupil_of(made, scale, rank, torch.float32)
    x = torch.zeros(60, 3, 2, 32)
    x[:, made.source_layers()] = inputs.raw(tokens, 4, 64)
    standard = inputs.standardised([Cut(tokens, 64, 64)], 4, scale, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(pupil(standard), made.project(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(pupil.projector().project(x), made.project(x), rtol=1e-4, atol=1e-4)
        for parameter in pupil.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
        moved = pupil(standard)
        assert (moved - made.project(x)).abs().max() > 1e-2
        torch.testing.assert_close(pupil.projector().project(x), moved, rtol=1e-3, atol=1e-3)
    assert {id(p) for p, _ in pupil.rates()} == {id(p) for p in pupil.parameters()}


@pytest.mark.parametrize("case", sorted(KINDS))
def test_the_kl_falls_where_it_is_judged(stores: Stores, case: str) -> None:
    found = run(stores, options(), start=projector(case))
    assert found.kl_after < 0.95 * found.kl_before
    assert found.steps > 0
    assert found.kl_after == pytest.approx(sum(found.held.values()) / 2)


def test_a_low_rank_correction_helps_too(stores: Stores) -> None:
    assert (found := run(stores, options(parametrisation="lowrank", rank=4))).kl_after < 0.98 * found.kl_before


@pytest.mark.parametrize("case", ["trunk shell", "mlp"])
@pytest.mark.parametrize("tail", [0, 8])
def test_a_lesson_is_what_the_evaluator_would_measure(stores: Stores, case: str, tail: int) -> None:
    """Each lesson alone, by the plain way, against a batch of unequal lengths."""
    made, (source, target) = projector(case), stores
    room, inputs = classroom(stores, made, tail=tail)
    cuts = [Cut(d, p, e) for d, p, e in zip(documents(3, 64), (48, 32, 40), (60, 64, 48), strict=True)]
    pupil = pupil_of(made, inputs.scale(documents(2, 64)), 0, torch.float32)
    loss, found = room.loss(pupil, cuts)
    content = made.key_space == "content"
    for cut, kl in zip(cuts, found, strict=True):
        native, start = target.get(cut.tokens)[: cut.prefix], cut.prefix - tail
        x = rows(source.get(cut.tokens)[4:start], source.spec.rope if content else None, start=4)
        y = kv_of(made.project(x), 2, target.spec.rope if content else None, start=4)
        asked = cut.tokens[start : cut.end]
        q = target.model.logits(concat([native[:4], y]), asked)[tail:].log_softmax(-1)
        p = target.model.logits(native, cut.tokens[cut.prefix : cut.end]).log_softmax(-1)
        assert kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert loss.item() == pytest.approx(sum(found) / 3, rel=1e-4)


def test_a_steep_weight_leaves_the_first_token_behind_the_prefix(stores: Stores) -> None:
    made, document = projector(), documents(1, 64)[0]
    room, inputs = classroom(stores, made, fading=50.0)
    pupil = pupil_of(made, inputs.scale(documents(2, 64)), 0, torch.float32)
    loss, found = room.loss(pupil, [Cut(document, 40, 60)])
    first = room.loss(pupil, [Cut(document, 40, 41)])[1]
    assert loss.item() == pytest.approx(first[0], rel=1e-4)
    assert found[0] != pytest.approx(first[0], rel=1e-2)


def test_the_gradient_is_autograds(stores: Stores) -> None:
    frozen = FrozenTarget(stores[1].folder, torch.float32, CPU, checkpointing=False)
    said, wanted = torch.randn(70, 64, requires_grad=True), torch.randn(70, 64)
    weights = torch.rand(70)
    frozen.divergence(said, wanted, weights)[0].backward()
    got, said.grad = said.grad, None
    head = stores[1].model._head.weight
    p, q = ((h @ head.T).log_softmax(-1) for h in (wanted, said))
    ((p.exp() * (p - q)).sum(-1) * weights).sum().backward()
    torch.testing.assert_close(got, said.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", [{"checkpointing": True}, {"at_once": 1}])
def test_memory_is_saved_without_another_result(stores: Stores, change: dict[str, Any]) -> None:
    plain, other = (run(stores, options(steps=2, **c)) for c in ({}, change))
    assert other.kl_after == pytest.approx(plain.kl_after, rel=1e-4)
    assert other.kl_after < other.kl_before


def test_no_step_gives_the_projector_back(stores: Stores) -> None:
    before = projector("linear shell")
    after = run(stores, options(steps=1, learning_rate=0.0), start=before)
    x = rows(stores[0].get(documents(1, 64)[0]), stores[0].spec.rope)
    torch.testing.assert_close(after.projector.project(x), before.project(x), rtol=1e-4, atol=1e-4)
    assert (after.steps, after.kl_after) == (0, after.kl_before)


def test_it_ends_early_and_keeps_the_best(stores: Stores) -> None:
    found = run(stores, options(steps=40, learning_rate=20.0, patience=2))
    assert (found.ended, found.steps) == ("patience", 0)
    assert found.kl_after == found.kl_before


def test_a_training_that_diverges_ends(stores: Stores) -> None:
    found = run(stores, options(learning_rate=1e30, every=6))
    assert (found.ended, found.steps, found.kl_after) == ("diverged", 0, found.kl_before)


class _InterruptedError(Exception): ...


def test_interrupted_and_resumed_is_uninterrupted(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(stores, options(), tmp_path / "whole")
    steps, loss = 0, Classroom.loss

    def fails(self: Classroom, project: Any, cuts: Any, wanted: Any = None) -> Any:
        nonlocal steps
        steps += wanted is None
        if steps == 6:
            raise _InterruptedError
        return loss(self, project, cuts, wanted)

    with monkeypatch.context() as m:
        m.setattr(Classroom, "loss", fails)
        with pytest.raises(_InterruptedError):
            run(stores, options(), tmp_path / "parts")
    parts = run(stores, options(), tmp_path / "parts")
    assert (parts.kl_before, parts.kl_after, parts.steps) == (whole.kl_before, whole.kl_after, whole.steps)
    for name, tensor in whole.projector.tensors().items():
        assert torch.equal(tensor, parts.projector.tensors()[name]), name
    columns = [c for c in lines(tmp_path / "whole")[0].split(",") if c != "seconds"]
    assert columns == ["step", "learning_rate", "train_kl", "held_kl", "held_chat", "held_text"]
    without_time = [[row.rsplit(",", 1)[0] for row in lines(tmp_path / n)] for n in ("whole", "parts")]
    assert without_time[0] == without_time[1]
    assert len(without_time[0]) == 1 + 1 + 6  # header, start, steps


def lines(folder: Path) -> list[str]:
    return next(folder.glob(f"*/{METRICS}")).read_text().splitlines()


def test_other_options_are_another_training(stores: Stores, tmp_path: Path) -> None:
    for rate in (1e-3, 2e-3):
        run(stores, options(steps=1, learning_rate=rate), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_finished_training_is_read_back_unless_it_is_to_begin_anew(stores: Stores, tmp_path: Path) -> None:
    first = run(stores, options(steps=2, every=2, checkpoint_every=1), tmp_path)
    again, anew = (run(stores, options(steps=2, every=2, resume=resume), tmp_path) for resume in (True, False))
    assert again.seconds == first.seconds
    assert anew.seconds != first.seconds
    assert (again.kl_after, anew.kl_after) == (first.kl_after, first.kl_after)
    assert (again.folder, anew.folder) == (first.folder, first.folder)


def test_a_broken_state_is_refused(stores: Stores, tmp_path: Path) -> None:
    run(stores, options(steps=2), tmp_path)
    next(tmp_path.glob(f"*/{STATE}")).write_bytes(b"no state")
    with pytest.raises(ConversionError, match="unreadable state"):
        run(stores, options(steps=2), tmp_path)


def test_what_is_not_distilled(stores: Stores) -> None:
    identity = IdentityProjector(IdentityParameters(layers=2, width=16))
    with pytest.raises(ConversionRefused, match="content"):
        run(stores, options(), start=identity)
    with pytest.raises(ConfigError, match="held-out"):
        distil(projector(), *stores, Lessons(lessons().train, {}), options(), QUIET)


_WORKER = """
import sys
from pathlib import Path
import torch
from moonpool.c2c.fitting.capture import CaptureStore
from safetensors.torch import save_file
from tests.c2c import test_distil as t
root, out = map(Path, sys.argv[1:])
found = t.run(tuple(CaptureStore(root / "kept", root / n) for n in ("large", "small")), t.options(batch=1), out)
save_file(found.projector.tensors(), out / f"{len(list(out.glob('*.pid')))}-{__import__('os').getpid()}.safetensors")
"""


@pytest.mark.slow  # three processes that import torch
def test_two_processes_are_one_with_twice_the_batch(stores: Stores, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    alone = run(stores, options())
    script = tmp_path / "worker.py"
    script.write_text(_WORKER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(script), str(stores[0].folder.parent), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    both = [load_file(f) for f in sorted(tmp_path.glob("*.safetensors"))]
    assert len(both) == 2
    for name, tensor in alone.projector.tensors().items():
        assert torch.equal(both[0][name], both[1][name]), name
        torch.testing.assert_close(both[0][name], tensor, rtol=1e-2, atol=1e-3)
    assert len(list(tmp_path.glob(f"*/{METRICS}"))) == 1
