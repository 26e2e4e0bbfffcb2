"""The ridge finds a map that is there, the greedy choice is the refit's choice, and the mlp learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from moonpool.c2c.fitting.capture import CaptureStore
from moonpool.c2c.fitting.features import kv_of, rows
from moonpool.c2c.fitting.mlp import MlpOptions, fit_mlp, last_aligned
from moonpool.c2c.fitting.moments import Moments
from moonpool.c2c.fitting.ridge import Documents, FitOptions, candidates, fit_linear, key_gains
from moonpool.c2c.fitting.selection import Holdout, LayerChooser, ridge_weights, solve
from moonpool.errors import ConversionError, ModelError
from tests.c2c.tiny import documents, tiny_model

QUIET = Console(quiet=True)


def problem(noise: float = 0.0) -> tuple[Moments, Holdout, torch.Tensor]:
    """Six layers of 8 features; y (4 columns) reads layers 1 and 4 only."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(900, 6, 8, generator=g) * torch.logspace(-1, 2, 8) + 3
    x[:, 2] += x[:, 1]  # neighbours look alike
    weight = torch.randn(16, 4, generator=g)
    y = x[:, [1, 4]].flatten(1) @ weight + 0.5 + noise * torch.randn(900, 4, generator=g)
    moments = Moments(range(6), 8, 4)
    moments.add(x[:600].flatten(1), y[:600])
    return moments, Holdout(x[600:], y[600:], torch.ones(300)), weight


def test_ridge_recovers_a_known_map() -> None:
    moments, holdout, weight = problem()
    found = solve(moments, holdout, [4, 1], slice(0, 4), lambdas=(1e-9,))
    assert found.at == [1, 4]
    torch.testing.assert_close(found.weight, weight, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.bias, torch.full((4,), 0.5), rtol=1e-2, atol=1e-2)
    assert found.r2 > 0.9999


def test_the_held_out_rows_choose_the_ridge() -> None:
    moments, holdout, _ = problem(noise=100.0)
    errors = {r: solve(moments, holdout, [1, 4], slice(0, 4), lambdas=(r,)).r2 for r in (1e-5, 1e-2, 1e-1, 1.0)}
    found = solve(moments, holdout, [1, 4], slice(0, 4), lambdas=tuple(errors))
    assert found.r2 == max(errors.values())


def test_greedy_choice_finds_the_layers_that_are_read() -> None:
    moments, holdout, _ = problem()
    assert sorted(LayerChooser(moments, holdout, range(6)).choose(slice(0, 4), 2)) == [1, 4]


def test_greedy_choice_equals_refitting_every_candidate() -> None:
    moments, holdout, _ = problem(noise=30.0)
    chosen = LayerChooser(moments, holdout, range(6)).choose(slice(0, 4), 4)
    by_hand: list[int] = []
    for _ in range(4):
        left = {
            c: solve(moments, holdout, [*by_hand, c], slice(0, 4), lambdas=(1e-3,)).r2
            for c in set(range(6)) - {*by_hand}
        }
        by_hand.append(max(left, key=lambda c: left[c]))
    assert chosen == by_hand


def test_a_singular_matrix_is_an_error_not_a_number() -> None:
    with pytest.raises(ConversionError, match="positive definite"):
        ridge_weights(
            torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64)), torch.ones(2, 1, dtype=torch.float64), 1e-5
        )


def test_candidates_surround_both_alignments() -> None:
    assert candidates(0, 28, 24, 0) == list(range(28))
    assert candidates(0, 28, 24, 1) == [0, 1, 3, 4, 5]
    assert candidates(23, 28, 24, 2) == [25, 26, 27]
    assert candidates(7, 4, 8, 1) == [2, 3]


def test_last_aligned_never_leaves_the_source() -> None:
    assert last_aligned(5, 3) == [2, 3, 4]
    assert last_aligned(2, 4) == [0, 0, 0, 1]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[CaptureStore, CaptureStore]:
    root = tmp_path_factory.mktemp("fit")
    large, small = tiny_model(root / "large", layers=4, dim=16), tiny_model(root / "small", layers=3, dim=8, seed=1)
    return CaptureStore(root / "kept", large), CaptureStore(root / "kept", small)


def test_rows_and_kv_are_inverse(stores: tuple[CaptureStore, CaptureStore]) -> None:
    source = stores[0]
    kv = source.get(documents(1, 40)[0])
    back = kv_of(rows(kv, source.spec.rope), source.spec.num_kv_heads, source.spec.rope).rounded()
    torch.testing.assert_close(back.k, kv.k, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(back.v, kv.v)


def test_a_model_maps_to_itself(stores: tuple[CaptureStore, CaptureStore]) -> None:
    parts = Documents(documents(6, 128), documents(2, 128, seed=50))
    found = fit_linear(stores[0], stores[0], parts, FitOptions(layers_per_target=1, window=0), QUIET)
    assert [f.source_layers for f in found.layers] == [[t] for t in range(4) for _ in "kv"]
    assert min(f.r2 for f in found.layers) > 0.999
    assert found.tokens == 6 * 127, "position 0 stays out"


def test_a_fit_between_unequal_models(stores: tuple[CaptureStore, CaptureStore]) -> None:
    parts = Documents(documents(6, 128), documents(2, 128, seed=50))
    found = fit_linear(*stores, parts, FitOptions(layers_per_target=2, shell=True), QUIET)
    y = found.projector.project(rows(stores[0].get(parts.choose[0]), stores[0].spec.rope))
    assert y.shape == (128, 3, 2, 16)
    over_gain = (y[:, :, 0].unflatten(-1, (2, 8)) / key_gains(stores[1])[:, None]).square().mean(-1)
    torch.testing.assert_close(over_gain, torch.ones_like(over_gain), rtol=1e-2, atol=1e-2)


def test_attention_decides_what_counts(stores: tuple[CaptureStore, CaptureStore]) -> None:
    parts = Documents(documents(4, 96), documents(1, 96, seed=50))
    plain, weighted = (
        fit_linear(*stores, parts, FitOptions(layers_per_target=1, attention=a), QUIET).projector.tensors()["bias"]
        for a in (0.0, 1.0)
    )
    assert not torch.allclose(plain, weighted, atol=1e-3)


def test_the_shell_needs_a_model_with_key_norm(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="k_norm"):
        key_gains(CaptureStore(tmp_path, tiny_model(tmp_path / "m", "llama")))


def test_the_mlp_learns_and_folds_its_scales(stores: tuple[CaptureStore, CaptureStore]) -> None:
    parts = Documents(documents(6, 128), documents(2, 128, seed=50))
    options = MlpOptions(hidden=32, epochs=12, batch=64, learning_rate=3e-3)
    first, again = (fit_mlp(*stores, parts, options, QUIET) for _ in range(2))
    assert first.heldout_mse < 0.98
    x, y = (torch.cat([rows(s.get(d), None)[1:] for d in parts.choose]) for s in stores)
    found = first.projector.project(x)
    deviation = torch.cat([rows(stores[1].get(d), None)[1:] for d in parts.train]).std(0, correction=0)
    assert float(((found - y) / deviation).square().mean()) == pytest.approx(first.heldout_mse, rel=1e-3)
    torch.testing.assert_close(again.projector.project(x), found)
