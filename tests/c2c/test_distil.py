"""Distillation lowers the KL, starts from the projector that it is given, and never gives a worse one back."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from moonpool.c2c.fitting.capture import CaptureStore
from moonpool.c2c.fitting.distil import DistilOptions, Lesson, _rotated, distil
from moonpool.c2c.fitting.features import rows
from moonpool.c2c.fitting.ridge import Documents, FitOptions, fit_linear
from moonpool.c2c.projectors.identity import IdentityParameters, IdentityProjector
from moonpool.c2c.projectors.linear import LinearProjector
from moonpool.c2c.rope import rotate
from moonpool.errors import ConversionRefused
from tests.c2c.support import ROPES, with_dim
from tests.c2c.tiny import documents, tiny_model

QUIET = Console(quiet=True)
Stores = tuple[CaptureStore, CaptureStore]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    root = tmp_path_factory.mktemp("distil")
    large, small = tiny_model(root / "large", layers=3, dim=16), tiny_model(root / "small", layers=2, dim=8, seed=1)
    return CaptureStore(root / "kept", large), CaptureStore(root / "kept", small)


def lessons(count: int, seed: int) -> list[Lesson]:
    return [Lesson(d, 48) for d in documents(count, 64, seed=seed)]


def ridge(stores: Stores, *, shell: bool) -> LinearProjector:
    parts = Documents(documents(4, 64), documents(1, 64, seed=50))
    return fit_linear(*stores, parts, FitOptions(layers_per_target=1, shell=shell), QUIET).projector


@pytest.mark.parametrize("shell", [False, True])
def test_the_kl_falls_where_it_is_judged(stores: Stores, shell: bool) -> None:
    options = DistilOptions(steps=12, batch=2, learning_rate=1e-2, every=4)
    # Random models share nothing that carries over to other documents: judged on the lessons themselves.
    found = distil(ridge(stores, shell=shell), *stores, (lessons(2, 0), lessons(2, 0)), options, QUIET)
    assert found.kl_after < 0.9 * found.kl_before
    assert found.steps > 0


def test_no_step_gives_the_projector_back(stores: Stores) -> None:
    before = ridge(stores, shell=True)
    options = DistilOptions(steps=1, learning_rate=0.0)
    after = distil(before, *stores, (lessons(2, 0), lessons(1, 50)), options, QUIET)
    x = rows(stores[0].get(documents(1, 64)[0]), stores[0].spec.rope)
    torch.testing.assert_close(after.projector.project(x), before.project(x))
    assert (after.steps, after.kl_after) == (0, after.kl_before)


def test_only_content_space_is_distilled(stores: Stores) -> None:
    identity = IdentityProjector(IdentityParameters(layers=2, width=16))
    with pytest.raises(ConversionRefused, match="content"):
        distil(identity, *stores, ([], []), DistilOptions(), QUIET)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", sorted(ROPES))
def test_the_differentiable_rotation_is_the_rotation(kind: str) -> None:
    rope, at = with_dim(ROPES[kind], 8), torch.arange(100, 105)
    k = torch.randn(5, 2, 3, 12)
    torch.testing.assert_close(_rotated(k, at, rope), rotate(k, at, rope))
