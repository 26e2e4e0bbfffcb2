"""Projector kinds: what they compute, and that weights which do not fit are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from moonpool.c2c.projectors import build_projector
from moonpool.c2c.projectors.linear import LinearParameters, LinearProjector
from moonpool.c2c.projectors.mlp import MlpParameters, MlpProjector, aligned
from moonpool.errors import BundleCorrupt, ConversionRefused

SOURCES = [[[0, 1, 3], [1, 2]], [[2], [0, 1, 2, 3]]]
"""Two target layers; K and V read different layers, runs and gaps."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(shell: bool = False, **change: Any) -> LinearProjector:
    """4 layers of width 6 → 2 layers of width 4."""
    values: dict[str, Any] = {
        "source_layers": 4,
        "source_width": 6,
        "target_layers": 2,
        "target_width": 4,
        "sources": SOURCES,
        "shell_dim": 2 if shell else 0,
    }
    parameters = LinearParameters(**values | change)
    weights = [[randn(len(s) * 12, 4, seed=10 * t + h) for h, s in enumerate(p)] for t, p in enumerate(SOURCES)]
    return LinearProjector(parameters, weights, randn(2, 2, 4, seed=7), randn(2, 2, seed=8) if shell else None)


def by_hand(p: LinearProjector, x: Tensor) -> Tensor:
    """The definition, one number at a time, in fp64."""
    w = p.tensors()
    y = torch.zeros(x.shape[0], 2, 2, 4, dtype=torch.float64)
    for t, halves in enumerate(SOURCES):
        for h, layers in enumerate(halves):
            read = torch.cat([x[:, s].flatten(1) for s in layers], 1).double()
            y[:, t, h] = read @ w[f"layers.{t}.{'kv'[h]}.weight"].double() + w["bias"][t, h].double()
    return y


@pytest.mark.parametrize("layer_major", [False, True])
def test_linear_is_its_definition(layer_major: bool) -> None:
    p, x = linear(), randn(5, 4, 2, 6)
    given = x.transpose(0, 1).contiguous().transpose(0, 1) if layer_major else x
    before = given.clone()
    torch.testing.assert_close(p.project(given).double(), by_hand(p, x), rtol=1e-5, atol=1e-5)
    assert torch.equal(given, before)
    assert p.source_layers() == [0, 1, 2, 3]
    assert p.flops_per_token() == 2 * (3 + 2 + 1 + 4) * 12 * 4


def test_layers_that_are_not_read_may_hold_anything() -> None:
    parameters = LinearParameters(
        source_layers=3, source_width=2, target_layers=1, target_width=2, sources=[[[1], [1]]]
    )
    p = LinearProjector(parameters, [[randn(4, 2), randn(4, 2, seed=1)]], torch.zeros(1, 2, 2))
    x = torch.full((3, 3, 2, 2), torch.nan)
    x[:, 1] = randn(3, 2, 2)
    assert p.source_layers() == [1]
    assert torch.isfinite(p.project(x)).all()


def test_keys_on_the_shell_have_the_targets_norm() -> None:
    p = linear(shell=True)
    y = p.project(randn(5, 4, 2, 6))
    gain = p.tensors()["shell"]
    keys = y[:, :, 0].unflatten(-1, (2, 2)) / gain[None, :, None]
    torch.testing.assert_close(keys.square().mean(-1), torch.ones(5, 2, 2), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(y[:, :, 1], linear().project(randn(5, 4, 2, 6))[:, :, 1])


def test_a_head_local_map_is_a_block_diagonal_one() -> None:
    """Heads 3 × 2 of the source each make head h of the target alone; the full map with zeros elsewhere says the same."""
    heads, d_in, d_out = 3, 2, 2
    blocks = randn(2, heads, 2 * d_in, d_out)  # half, head: K and V of the source's head → one half of the target's
    weight = torch.zeros(2, 2, heads, d_in, heads, d_out)
    for h in range(heads):
        weight[:, :, h, :, h] = blocks[:, h].unflatten(1, (2, d_in))
    parameters = LinearParameters(
        source_layers=1, source_width=6, target_layers=1, target_width=6, sources=[[[0], [0]]]
    )
    p = LinearProjector(parameters, [[weight[i].reshape(12, 6) for i in (0, 1)]], torch.zeros(1, 2, 6))
    x = randn(7, 1, 2, 6)
    per_head = x[:, 0].unflatten(-1, (heads, d_in)).permute(0, 2, 1, 3).flatten(2)
    want = torch.einsum("nhi,shio->nsho", per_head, blocks).flatten(2)
    torch.testing.assert_close(p.project(x)[:, 0], want)


def test_mlp_is_issue_1520s_shape() -> None:
    parameters = MlpParameters(
        source_layers=4, source_width=6, target_layers=2, target_width=4, hidden=5, sources=[2, 3]
    )
    tensors = {
        "1.weight": randn(2, 2, 6, 5),
        "1.bias": randn(2, 2, 5),
        "2.weight": randn(2, 2, 5, 5),
        "2.bias": randn(2, 2, 5, seed=1),
        "3.weight": randn(2, 2, 5, 4),
        "3.bias": randn(2, 2, 4),
        "gate": randn(2, 2),
    }
    p = MlpProjector.build(vars_of(parameters), tensors)
    x = randn(3, 4, 2, 6)
    assert p.key_space == "rotated"
    assert p.source_layers() == [2, 3]
    assert p.tensors().keys() == tensors.keys()
    h = gelu(x[:, 3, 1] @ tensors["1.weight"][1, 1] + tensors["1.bias"][1, 1])
    h = gelu(h @ tensors["2.weight"][1, 1] + tensors["2.bias"][1, 1])
    want = (h @ tensors["3.weight"][1, 1] + tensors["3.bias"][1, 1]) * torch.sigmoid(tensors["gate"][1, 1])
    torch.testing.assert_close(p.project(x)[:, 1, 1], want)
    content = MlpProjector.build({**vars_of(parameters), "key_space": "content"}, tensors)
    assert content.key_space == "content"


def vars_of(parameters: Any) -> dict[str, Any]:
    return {f: getattr(parameters, f) for f in parameters.__struct_fields__}


def test_alignment_of_layers() -> None:
    assert aligned(6, 4, "last") == [2, 3, 4, 5]
    assert aligned(28, 24, "depth")[::23] == [0, 27]
    assert aligned(3, 5, "depth") == [0, 1, 1, 2, 2]
    assert aligned(1, 1, "depth") == [0]


def test_o6_layers_without_a_source_are_refused_by_number() -> None:
    with pytest.raises(ConversionRefused, match=r"target layers 0\.\.3"):
        aligned(24, 28, "last")
    with pytest.raises(BundleCorrupt, match="without sources: 2, 3"):
        linear(target_layers=4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sources": [[[0], [0]], [[], [1]]]}, "layer 1 reads impossible"),
        ({"sources": [[[0], [4]], [[0], [1]]]}, "layer 0 reads impossible source layers for v"),
        ({"sources": [[[0], [-1]], [[0], [1]]]}, "layer 0 reads impossible"),
        ({"sources": [[[1, 0], [0]], [[0], [1]]]}, "ascending"),
        ({"sources": [[[0]], [[0], [1]]]}, "for K and for V"),
        ({"source_width": 0}, "source_width"),
        ({"shell_dim": 3}, "shell"),
        ({"eps": 0.0}, "shell"),
        ({"key_space": "sideways"}, "key_space"),
        ({"hidden": 3}, "hidden"),
        ({"source_layers": "four"}, "source_layers"),
    ],
)
def test_impossible_parameters_are_refused(change: dict[str, Any], says: str) -> None:
    p = linear()
    with pytest.raises(BundleCorrupt, match=says):
        build_projector("linear", {**p.parameters(), **change}, p.tensors())


def test_bad_weights_are_refused_by_name() -> None:
    p = linear(shell=True)
    name = "layers.1.v.weight"
    good = p.tensors()
    bad: dict[str, dict[str, Tensor]] = {
        "is missing": {k: v for k, v in good.items() if k != name},
        "of the wrong shape": {**good, name: good[name][:-1]},
        "NaN or Inf": {**good, name: good[name].clone().fill_(torch.nan)},
        "or Inf": {**good, name: good[name].clone().fill_(torch.inf)},
        "of the wrong type": {**good, name: good[name].to(torch.int32)},
        "does not have": {**good, "layers.9.k.weight": good[name]},
    }
    for says, tensors in bad.items():
        with pytest.raises(BundleCorrupt, match=says) as e:
            build_projector("linear", p.parameters(), tensors)
        assert "layers." in str(e.value)


def test_built_again_it_is_the_same() -> None:
    p, x = linear(shell=True), randn(5, 4, 2, 6)
    assert torch.equal(build_projector("linear", p.parameters(), p.tensors()).project(x), p.project(x))


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(BundleCorrupt, match="identity, linear, lookback, mlp, trunk"):
        build_projector("fusion", {}, {})
