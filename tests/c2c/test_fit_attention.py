"""The attention output's error, as layers are chosen and values repaired by it."""

from __future__ import annotations

import msgspec
import pytest
import torch
from rich.console import Console

from moonpool.c2c.fitting.attention import Judge, asked, asked_at
from moonpool.c2c.fitting.capture import CaptureStore
from moonpool.c2c.fitting.features import rows
from moonpool.c2c.fitting.gather import Documents, Pass, Weighting, key_gains
from moonpool.c2c.fitting.prepare import FitOptions
from moonpool.c2c.fitting.repair import averaged
from moonpool.c2c.fitting.ridge import fit_linear
from moonpool.c2c.fitting.selection import LayerChooser, Verdict
from tests.c2c.test_fit import problem
from tests.c2c.tiny import documents, tiny_model

QUIET = Console(quiet=True)
OPTIONS = FitOptions(layers_per_target=1, window=0, queries=16, judged_documents=2)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CaptureStore:
    root = tmp_path_factory.mktemp("attention")
    return CaptureStore(root / "kept", tiny_model(root / "m", request.param, layers=2, dim=8, seed=1))


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[CaptureStore, CaptureStore]:
    root = tmp_path_factory.mktemp("pair")
    large, small = tiny_model(root / "large", layers=4), tiny_model(root / "small", layers=3, dim=8, seed=1)
    return CaptureStore(root / "kept", large), CaptureStore(root / "kept", small)


def test_the_output_is_what_the_model_computes(store: CaptureStore) -> None:
    document = documents(1, 48)[0]
    at = asked_at(48, 16)
    with store.model.attention_outputs() as seen:
        store.model.logits(None, document)
    for t, one in enumerate(asked(store, document, range(2), 16)):
        mine = one.output.permute(2, 0, 1, 3).flatten(1)
        torch.testing.assert_close(mine, seen[t][0, at], rtol=2e-2, atol=2e-2)


def test_native_rows_have_no_error_and_wrong_ones_have(store: CaptureStore) -> None:
    told = documents(2, 48)
    gains = key_gains(store) if store.spec.qk_norm else None
    native = torch.cat([rows(store.get(d), store.spec.rope)[1:] for d in told])[:, 1]
    keys, values = native[:, 0].clone(), native[:, 1]
    if gains is not None:
        keys /= gains[1].repeat(2)
    judge = Judge([asked(store, d, [1], 16)[0] for d in told], store.spec, gains[1] if gains is not None else None)
    assert judge.rows == len(values) == 2 * 47
    assert judge.keys(keys) < 1e-3
    assert judge.values(values) < 1e-6
    assert judge.keys(keys.roll(1, 0)) > 0.01
    assert judge.values(values.roll(1, 0)) > 0.01
    heads = [judge.head(h).values(values.unflatten(1, (2, -1))[:, h].roll(1, 0)) for h in (0, 1)]
    assert min(heads) < judge.values(values.roll(1, 0)) < max(heads)


def test_a_verdict_decides_among_the_few_best() -> None:
    moments, holdout, _ = problem(noise=30.0)
    best = LayerChooser(moments, holdout, range(6)).choose(slice(0, 4), 1)
    scores = iter([2.0, 1.0, 3.0])
    chooser = LayerChooser(moments, holdout, range(6), whole=200)
    other = chooser.choose(slice(0, 4), 1, Verdict(lambda rows: next(scores), 200, few=3))
    assert other != best
    assert chooser.choose(slice(0, 4), 1, Verdict(lambda rows: 1.0, 200)) == best, (
        "equal scores leave the residual's order"
    )


def test_a_verdict_sees_what_the_layers_would_predict() -> None:
    moments, holdout, _ = problem()
    errors: list[float] = []

    def score(rows: torch.Tensor) -> float:
        errors.append(float((rows - holdout.y[:200]).square().mean() / holdout.y.var()))
        return errors[-1]

    chosen = LayerChooser(moments, holdout, range(6), whole=200).choose(slice(0, 4), 2, Verdict(score, 200, few=6))
    assert sorted(chosen) == [1, 4]
    assert min(errors) < 1e-3 < max(errors)


def test_averaged_rows_obey_the_plain_rows_map(store: CaptureStore) -> None:
    """A model against itself: averaged values are still its own values."""
    told = documents(6, 64)
    found = averaged(Pass(store, store, Weighting()), told, [[0], [1]], 2 * 16, 16, QUIET)
    assert found[1].layers == [1]
    width = found[1].xy.shape[1]
    values = found[1].cross([0], slice(0, width))[width:]
    torch.testing.assert_close(values, found[1].covariance([0], [0])[width:, width:], rtol=1e-4, atol=1e-6)


def test_choosing_by_attention_and_repairing_does_no_harm(stores: tuple[CaptureStore, CaptureStore]) -> None:
    parts = Documents(documents(6, 96), documents(3, 96, seed=50))
    by_attention = msgspec.structs.replace(OPTIONS, choose="attention", few=4)
    chosen, repaired = (
        fit_linear(*stores, parts, o, QUIET).layers
        for o in (by_attention, msgspec.structs.replace(by_attention, repair_values=True))
    )
    for before, after in zip(chosen, repaired, strict=True):
        assert before.error is not None
        assert after.error is not None
        assert after.source_layers == before.source_layers
        assert after.error <= before.error * (1 + 1e-6)
        assert (after.error < before.error) == (after.averaged > 0)
    assert any(layer.averaged for layer in repaired)
    assert not any(layer.averaged for layer in repaired if layer.half == "k")
