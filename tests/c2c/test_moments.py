"""Moments: merging is one pass, weights are repetitions, files come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.c2c.fitting.moments import Moments
from moonpool.c2c.fitting.selection import ridge_weights
from moonpool.errors import BundleCorrupt, ConfigError

ALL = [0, 1, 2]


def data(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 12, generator=g) * 3 + 100, torch.randn(rows, 5, generator=g) - 7


def gathered(x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor | None = None) -> Moments:
    moments = Moments([0, 2, 5], 4, 5)
    moments.add(x, y, weights)
    return moments


def assert_same(a: Moments, b: Moments) -> None:
    """Equal as statistics; what the sums are relative to may differ."""
    every = slice(0, 5)
    for of in (
        lambda m: m.covariance(ALL, ALL),
        lambda m: m.cross(ALL, every),
        lambda m: m.mean_x(ALL),
        lambda m: m.mean_y(every),
        lambda m: m.variance_y(every),
        lambda m: m.weight,
    ):
        torch.testing.assert_close(of(a), of(b), rtol=1e-5, atol=1e-5)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_merging_parts_is_one_pass(sizes: list[int], seed: int) -> None:
    x, y = data(sum(sizes), seed)
    merged = Moments([0, 2, 5], 4, 5)
    for part_x, part_y in zip(x.split(sizes), y.split(sizes), strict=True):
        merged.merge(gathered(part_x, part_y))
    assert_same(merged, gathered(x, y))


def test_a_weight_of_two_is_the_row_twice() -> None:
    x, y = data(6)
    weights = torch.tensor([1.0, 2, 1, 0, 3, 1])
    again = torch.repeat_interleave(torch.arange(6), weights.long())
    assert_same(gathered(x, y, weights), gathered(x[again], y[again]))


def test_covariances_are_those_of_the_rows() -> None:
    x, y = data(50)
    moments = gathered(x, y)
    both = torch.cov(torch.cat([x, y], 1).double().T, correction=0)
    at = [2, 0]
    columns = torch.cat([torch.arange(8, 12), torch.arange(0, 4)])
    torch.testing.assert_close(moments.covariance(at, at), both[columns][:, columns], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moments.cross(at, slice(1, 4)), both[columns][:, 13:16], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moments.variance_y(slice(0, 5)), both.diagonal()[12:], rtol=1e-5, atol=1e-5)


def test_products_in_fp32_are_as_good_as_in_fp64() -> None:
    """Columns that look alike, with means a thousand times their deviation, more rows than one block."""
    g = torch.Generator().manual_seed(3)
    common = torch.randn(5000, 1, generator=g, dtype=torch.float64)
    x = 50 + 0.05 * (common + 0.1 * torch.randn(5000, 12, generator=g, dtype=torch.float64))
    y = 100 + x[:, :5] @ torch.randn(5, 5, generator=g, dtype=torch.float64)
    x, y = x.float(), y.float()
    moments = Moments([0, 2, 5], 4, 5)
    for part_x, part_y in zip(x.split(700), y.split(700), strict=True):
        moments.add(part_x, part_y)
    exact = torch.cov(torch.cat([x, y], 1).double().T, correction=0)
    deviation = exact.diagonal().sqrt()
    scale = torch.outer(deviation[:12], deviation)
    found = torch.cat([moments.covariance(ALL, ALL), moments.cross(ALL, slice(0, 5))], 1)
    assert float(((found - exact[:12]) / scale).abs().max()) < 1e-6
    gram, cross = exact[:12, :12] / scale[:, :12], exact[:12, 12:]
    mine = ridge_weights(found[:, :12] / scale[:, :12], found[:, 12:], 1e-3)
    torch.testing.assert_close(mine, ridge_weights(gram, cross, 1e-3), rtol=1e-5, atol=1e-6)


def test_a_part_is_the_moments_of_its_columns() -> None:
    x, y = data(50)
    part = gathered(x, y).part([0, 2], torch.tensor([1, 3]), torch.tensor([4, 0]))
    assert (part.layers, part.layer_width) == ([0, 5], 2)
    both = torch.cov(torch.cat([x[:, [1, 3, 9, 11]], y[:, [4, 0]]], 1).double().T, correction=0)
    torch.testing.assert_close(part.covariance([0, 1], [0, 1]), both[:4, :4], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(part.cross([0, 1], slice(0, 2)), both[:4, 4:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(part.mean_y(slice(0, 2)), y[:, [4, 0]].double().mean(0))


def test_moments_of_a_product_are_those_of_its_rows() -> None:
    x, y = data(50)
    down = torch.randn(12, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = gathered(x, y).through(down)
    both = torch.cov(torch.cat([x.double() @ down, y.double()], 1).T, correction=0)
    torch.testing.assert_close(found.covariance([0], [0]), both[:3, :3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.cross([0], slice(0, 5)), both[:3, 3:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.mean_x([0]), (x.double() @ down).mean(0), rtol=1e-6, atol=1e-5)


def test_scaled_rows_weigh_more_in_a_merge() -> None:
    x, y = data(20)
    one, two = gathered(x[:8], y[:8]), gathered(x[8:], y[8:])
    one.merge(two.scaled(3))
    assert_same(one, gathered(x, y, torch.tensor([1.0] * 8 + [3.0] * 12)))


def test_a_column_that_does_not_vary_has_deviation_one() -> None:
    x, y = data(9)
    x[:, 1] = 5
    assert gathered(x, y).deviation([0])[1] == 1


def test_file_round_trip(tmp_path: Path) -> None:
    moments = gathered(*data(9))
    moments.save(tmp_path / "m.safetensors")
    found = Moments.load(tmp_path / "m.safetensors")
    assert (found.layers, found.layer_width) == ([0, 2, 5], 4)
    assert_same(found, moments)


def test_other_columns_do_not_merge() -> None:
    with pytest.raises(ConfigError, match="other layers"):
        gathered(*data(3)).merge(Moments([0, 1, 5], 4, 5))


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"nothing")
    with pytest.raises(BundleCorrupt):
        Moments.load(tmp_path / "m")
