"""Weights in 8 bits: how near they come, that nothing drifts, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from moonpool.c2c.bundle import WEIGHTS, open_bundle, write_bundle
from moonpool.c2c.fitting.rounding import settled
from moonpool.c2c.projectors import build_projector
from moonpool.c2c.projectors.base import Projector
from moonpool.c2c.projectors.headlocal import HeadLocalProjector
from moonpool.c2c.projectors.stored import COLUMNS, ROWS, as_read, as_stored
from moonpool.errors import BundleCorrupt
from tests.c2c.support import spec

SIZES = {"down.weight": (48, 12), "up.weight": (12, 32)}
SHAPE: dict[str, Any] = {"source_layers": 3, "source_width": 8, "target_layers": 2, "target_width": 8, "rank": 12}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trunk() -> Projector:
    weights = {n: randn(*s, seed=i) for i, (n, s) in enumerate(SIZES.items())}
    return build_projector("trunk", SHAPE, {**weights, "bias": randn(2, 2, 8)})


def stored(weight: Tensor) -> dict[str, Tensor]:
    return as_stored({"weight": weight}, torch.int8)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Rows and columns of scales far apart, some of zeros; one matrix or a few."""
    shape = [*draw(st.lists(st.integers(1, 3), max_size=1)), *draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))]
    seed, spread = draw(st.integers(0, 1 << 20)), draw(st.sampled_from([0.0, 1.0, 5.0]))
    rows, columns = randn(*shape[:-1], 1, seed=seed + 1), randn(*shape[:-2], 1, shape[-1], seed=seed + 2)
    weight = randn(*shape, seed=seed) * (spread * rows).exp() * (spread * columns).exp()
    weight[..., draw(st.integers(0, shape[-2] - 1)), :] *= draw(st.sampled_from([0.0, 1.0, 1e-30]))
    weight[..., draw(st.integers(0, shape[-1] - 1))] *= draw(st.sampled_from([0.0, 1.0, 1e30]))
    return weight.clamp(-1e36, 1e36)  # the scales multiplied may pass what fp32 holds


@given(matrices())
@settings(max_examples=150, deadline=None)
def test_no_number_is_off_by_more_than_half_a_step_and_a_second_writing_is_the_first(weight: Tensor) -> None:
    once = stored(weight)
    again = as_read(once)["weight"]
    step = once["weight" + ROWS][..., :, None] * once["weight" + COLUMNS][..., None, :]
    assert bool(((again - weight).abs() <= 0.5001 * step).all())
    largest = weight.abs().amax(-2)
    assert bool((step.amax(-2) <= (largest / 127 * (1 + 2**-8)).clamp(min=2**-80)).all())
    twice = stored(again)
    assert twice.keys() == once.keys()
    assert all(torch.equal(once[n], twice[n]) for n in once)


def test_rows_and_columns_of_unlike_scales_lose_no_more_than_others() -> None:
    even = randn(400, 100)
    unlike = even * (1.5 * randn(400, 1, seed=1)).exp() * (1.5 * randn(1, 100, seed=2)).exp()
    for weight, lost in ((even, 0.01), (unlike, 0.025)):
        error = as_read(stored(weight))["weight"] - weight
        assert float((error.norm(dim=0) / weight.norm(dim=0)).mean()) < lost
        assert float((error.norm(dim=1) / weight.norm(dim=1)).mean()) < lost


def test_a_bundle_in_8_bits_is_half_the_size_and_does_not_drift(tmp_path: Path) -> None:
    models, kind = (spec("big", layers=3, dim=8), spec("small", layers=2, dim=8)), trunk()
    first = write_bundle(tmp_path / "first", kind, *models, dtype=torch.int8)
    held = load_file(first.folder / WEIGHTS)
    assert {n: t.dtype for n, t in held.items() if t.dim() == 2} == dict.fromkeys(SIZES, torch.int8)
    assert torch.equal(held["bias"], kind.tensors()["bias"])
    read = open_bundle(first.folder).projector()
    assert write_bundle(tmp_path / "second", read, *models, dtype=torch.int8).digest == first.digest
    x = randn(5, 3, 2, 8)
    assert float((read.project(x) - kind.project(x)).norm() / kind.project(x).norm()) < 0.02


def test_a_stack_of_matrices_has_scales_for_each() -> None:
    parameters: dict[str, Any] = {
        "source_layers": 1,
        "source_width": 4,
        "target_layers": 1,
        "target_width": 6,
        "heads": 2,
    }
    parameters |= {"sources": [[[[0], [0]], [[0], [0]]]]}
    weights = {f"layers.0.{h}.weight": randn(2, 4, 3, seed=i) for i, h in enumerate("kv")}
    made = HeadLocalProjector.build(parameters, {**weights, "bias": randn(1, 2, 6)})
    kept = as_stored(made.tensors(), torch.int8)
    assert kept["layers.0.k.weight" + ROWS].shape == (2, 4)
    assert kept["layers.0.k.weight" + COLUMNS].shape == (2, 3)
    again = build_projector(made.kind, parameters, kept)
    assert torch.equal(as_stored(again.tensors(), torch.int8)["layers.0.k.weight"], kept["layers.0.k.weight"])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_none_are_not_hidden(value: float) -> None:
    weights = trunk().tensors()
    weights["down.weight"][3, 3] = value
    with pytest.raises(BundleCorrupt, match="finite"):
        build_projector("trunk", SHAPE, as_stored(weights, torch.int8))


def test_what_does_not_fit_is_refused() -> None:
    good = as_stored(trunk().tensors(), torch.int8)
    rows, columns = "down.weight" + ROWS, "up.weight" + COLUMNS
    build_projector("trunk", SHAPE, good)
    for why, change in (
        ("missing", {rows: None}),
        ("missing", {columns: None}),
        ("wrong type or shape", {rows: good[rows].half()}),
        ("wrong type or shape", {columns: good[columns][:-1]}),
        ("not positive and finite", {rows: good[rows] * torch.nan}),
        ("not positive and finite", {rows: good[rows] * 0}),
        ("does not have", {"bias" + ROWS: good[rows]}),
        ("wrong type", {"up.weight": good["up.weight"].to(torch.int16)}),
        ("wrong shape", {"up.weight": good["up.weight"].T.contiguous(), **swapped(good, "up.weight")}),
        ("without rows", {"bias": torch.ones(8, dtype=torch.int8)}),
    ):
        with pytest.raises(BundleCorrupt, match=why):
            build_projector("trunk", SHAPE, {n: t for n, t in {**good, **change}.items() if t is not None})


def swapped(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {name + ROWS: tensors[name + COLUMNS], name + COLUMNS: tensors[name + ROWS]}


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_a_large_mean_leaves_no_offset(dtype: torch.dtype) -> None:
    """Features of a hundred deviations' mean: rounding a weight moves every token's result alike, and the bias takes that back."""
    made, mean = trunk(), 100 * randn(3, 2, 8, seed=5)
    x = mean + randn(64, 3, 2, 8, seed=6)
    kept = settled(made, mean, dtype)
    plain = build_projector("trunk", SHAPE, as_read(as_stored(made.tensors(), dtype)))
    want = made.project(x)
    errors = [float((p.project(x) - want).square().mean().sqrt()) for p in (plain, kept)]
    assert errors[1] < 0.1 * errors[0]
    torch.testing.assert_close(kept.project(mean[None]), made.project(mean[None]), rtol=1e-4, atol=1e-2)
    again = as_stored(kept.tensors(), dtype)
    assert all(torch.equal(t, again[n]) for n, t in as_stored(plain.tensors(), dtype).items() if n != "bias")
