"""`trunk` and `headlocal` compute their definitions, in every layout, and refuse weights that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moonpool.c2c.projectors import build_projector
from moonpool.c2c.projectors.base import Projector
from moonpool.c2c.projectors.coded import CodedParameters, CodedProjector
from moonpool.c2c.projectors.headlocal import HeadLocalParameters, HeadLocalProjector
from moonpool.c2c.projectors.lookback import LookBackParameters, LookBackProjector
from moonpool.c2c.projectors.trunk import TrunkParameters, TrunkProjector
from moonpool.errors import BundleCorrupt, ConversionRefused

SOURCES = [[[[0, 2], [1, 2]], [[1], [3]]], [[[0], [0]], [[0, 3], [0, 1]]]]
"""Two target layers, K and V, two heads."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trunk(shell: bool = False) -> TrunkProjector:
    """4 layers of width 6 → 2 layers of width 4 through 3 numbers."""
    p = TrunkParameters(
        source_layers=4, source_width=6, target_layers=2, target_width=4, rank=3, shell_dim=2 if shell else 0
    )
    gains = randn(2, 2, seed=8) if shell else None
    return TrunkProjector(p, randn(48, 3), randn(3, 16, seed=1), randn(2, 2, 4, seed=7), gains)


def head_local(shell: bool = False) -> HeadLocalProjector:
    """4 layers of 2 heads of 3 → 2 layers of 2 heads of 2."""
    p = HeadLocalParameters(
        source_layers=4,
        source_width=6,
        target_layers=2,
        target_width=4,
        heads=2,
        sources=SOURCES,
        shell_dim=2 if shell else 0,
    )
    weights = [
        [randn(2, len(half[0]) * 6, 2, seed=10 * t + h) for h, half in enumerate(pair)]
        for t, pair in enumerate(SOURCES)
    ]
    return HeadLocalProjector(p, weights, randn(2, 2, 4, seed=7), randn(2, 2, seed=8) if shell else None)


def coded(shell: bool = False) -> CodedProjector:
    """The trunk beside a code of 5 numbers."""
    inner = trunk(shell)
    p = CodedParameters(**inner.parameters(), code=5)
    return CodedProjector(p, inner, (randn(12, 5, seed=20), randn(5, seed=21), randn(5, 3, seed=22)))


def layer_major(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def test_a_trunk_is_two_products() -> None:
    p, x = trunk(), randn(5, 4, 2, 6, seed=3)
    w = p.tensors()
    want = (x.flatten(1) @ w["down.weight"] @ w["up.weight"]).view(5, 2, 2, 4) + w["bias"]
    for given in (x, layer_major(x)):
        before = given.clone()
        torch.testing.assert_close(p.project(given), want)
        assert torch.equal(given, before)
    assert p.source_layers() == [0, 1, 2, 3]
    assert p.flops_per_token() == 2 * (48 * 3 + 3 * 16)


def test_head_local_reads_each_heads_own_layers() -> None:
    p, x = head_local(), randn(5, 4, 2, 6, seed=3)
    w = p.tensors()
    heads = x.unflatten(-1, (2, 3))
    want = torch.zeros(5, 2, 2, 2, 2)
    for t, pair in enumerate(SOURCES):
        for half, of_heads in enumerate(pair):
            for h, layers in enumerate(of_heads):
                read = torch.cat([heads[:, s, :, h].flatten(1) for s in layers], 1)
                want[:, t, half, h] = read @ w[f"layers.{t}.{'kv'[half]}.weight"][h]
    want = want.flatten(3) + w["bias"]
    for given in (x, layer_major(x)):
        before = given.clone()
        torch.testing.assert_close(p.project(given), want)
        assert torch.equal(given, before)
    assert p.source_layers() == [0, 1, 2, 3]
    assert p.flops_per_token() == 2 * 6 * 2 * (2 + 2 + 1 + 1 + 1 + 1 + 2 + 2)


def test_layers_that_are_not_read_may_hold_anything() -> None:
    p = HeadLocalParameters(
        source_layers=3, source_width=4, target_layers=1, target_width=4, heads=2, sources=[[[[1], [1]], [[1], [1]]]]
    )
    made = HeadLocalProjector(p, [[randn(2, 4, 2), randn(2, 4, 2, seed=1)]], torch.zeros(1, 2, 4))
    x = torch.full((3, 3, 2, 4), torch.nan)
    x[:, 1] = randn(3, 2, 4)
    assert torch.isfinite(made.project(x)).all()


@pytest.mark.parametrize("make", [trunk, head_local])
def test_keys_on_the_shell_have_the_targets_norm(make: Any) -> None:
    x = randn(5, 4, 2, 6, seed=3)
    on, off = make(shell=True), make()
    keys = on.project(x)[:, :, 0].unflatten(-1, (2, 2)) / on.tensors()["shell"][None, :, None]
    torch.testing.assert_close(keys.square().mean(-1), torch.ones(5, 2, 2), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(on.project(x)[:, :, 1], off.project(x)[:, :, 1])


@pytest.mark.parametrize("made", [trunk(), trunk(shell=True), head_local(), head_local(shell=True)])
def test_what_is_stored_builds_the_same_again(made: Projector) -> None:
    again = build_projector(made.kind, made.parameters(), made.tensors())
    x = randn(5, 4, 2, 6, seed=3)
    torch.testing.assert_close(again.project(x), made.project(x))


@pytest.mark.parametrize(
    ("made", "change"),
    [
        (trunk(), {"rank": 2}),
        (trunk(), {"rank": 0}),
        (trunk(), {"shell_dim": 3}),
        (head_local(), {"heads": 4}),
        (head_local(), {"heads": 3}),
        (head_local(), {"sources": SOURCES[:1]}),
        (head_local(), {"sources": [[[[0, 2], [1]], SOURCES[0][1]], SOURCES[1]]}),
        (head_local(), {"sources": [[[[0, 4], [1, 2]], SOURCES[0][1]], SOURCES[1]]}),
        (head_local(), {"sources": [[[[], []], SOURCES[0][1]], SOURCES[1]]}),
        (head_local(), {"shell_dim": 1}),
    ],
)
def test_what_does_not_fit_is_refused(made: Projector, change: dict[str, Any]) -> None:
    with pytest.raises(BundleCorrupt):
        build_projector(made.kind, made.parameters() | change, made.tensors())


@pytest.mark.parametrize("shell", [False, True])
def test_a_coded_trunk_adds_what_layer_0_says_of_the_token(shell: bool) -> None:
    p, x = coded(shell), randn(7, 4, 2, 6, seed=3)
    w = p.tensors()
    h = torch.nn.functional.gelu(x[:, 0].flatten(1) @ w["code.weight"] + w["code.offset"])
    z = x.flatten(1) @ w["down.weight"] + h @ w["read.weight"]
    want = (z @ w["up.weight"]).view(7, 2, 2, 4) + w["bias"]
    if shell:
        heads = want[:, :, 0].unflatten(-1, (2, 2))
        heads *= torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6) * w["shell"][None, :, None]
    for given in (x, layer_major(x)):
        kept = given.clone()
        torch.testing.assert_close(p.project(given), want)
        assert torch.equal(given, kept)
    assert p.flops_per_token() == 2 * (48 * 3 + 3 * 16 + 12 * 5 + 5 * 3)
    again = build_projector("coded", p.parameters(), p.tensors())
    assert torch.equal(again.project(x), p.project(x))


def test_a_coded_trunk_refuses_what_does_not_fit() -> None:
    p = coded()
    for name, wrong in (("code.weight", randn(11, 5)), ("read.weight", randn(5, 4)), ("code.offset", randn(4))):
        with pytest.raises(BundleCorrupt, match="shape"):
            build_projector("coded", p.parameters(), {**p.tensors(), name: wrong})
    with pytest.raises(BundleCorrupt, match="token's"):
        build_projector("coded", {**p.parameters(), "key_space": "rotated"}, p.tensors())


def look_back() -> LookBackProjector:
    """A coded trunk that reads the code before, too, in pages of 4 tokens."""
    inner = trunk()
    p = LookBackParameters(**inner.parameters(), code=5, page_size=4)
    shapes = {
        "code.weight": (12, 5),
        "code.offset": (5,),
        "code.blank": (5,),
        "read.weight": (5, 3),
        "back.weight": (5, 3),
    }
    return LookBackProjector(p, inner, {n: randn(*s, seed=20 + i) for i, (n, s) in enumerate(shapes.items())})


def test_a_look_back_reads_the_token_before_within_the_page() -> None:
    p, x = look_back(), randn(8, 4, 2, 6, seed=3)
    w = p.tensors()
    h = torch.nn.functional.gelu(x[:, 0].flatten(1) @ w["code.weight"] + w["code.offset"])
    earlier = torch.stack([h[i - 1] if i % 4 else w["code.blank"] for i in range(8)])
    z = x.flatten(1) @ w["down.weight"] + h @ w["read.weight"] + earlier @ w["back.weight"]
    torch.testing.assert_close(p.project(x), (z @ w["up.weight"]).view(8, 2, 2, 4) + w["bias"])
    assert p.flops_per_token() == 2 * (48 * 3 + 3 * 16 + 12 * 5 + 2 * 5 * 3)
    again = build_projector("lookback", p.parameters(), p.tensors())
    assert torch.equal(again.project(x), p.project(x))
    torch.testing.assert_close(torch.cat([p.project(x[:4]), p.project(x[4:])]), p.project(x))  # pages stand alone


def test_a_look_back_refuses_what_does_not_fit() -> None:
    p = look_back()
    with pytest.raises(ConversionRefused, match="whole pages"):
        p.project(randn(6, 4, 2, 6))
    for name, wrong in (("code.blank", randn(4)), ("back.weight", randn(5, 4))):
        with pytest.raises(BundleCorrupt, match="shape"):
            build_projector("lookback", p.parameters(), {**p.tensors(), name: wrong})
    for change in ({"page_size": 0}, {"key_space": "rotated"}):
        with pytest.raises(BundleCorrupt):
            build_projector("lookback", {**p.parameters(), **change}, p.tensors())
