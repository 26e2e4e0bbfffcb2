"""The fuser against the published formula, written down here a second time, and who may use it."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from moonpool.c2c.bundle import open_bundle, write_bundle
from moonpool.c2c.projectors import build, build_projector
from moonpool.c2c.projectors.fuse import NATIVE, FuseParameters, Fuser, FuseStep, layer_shapes
from moonpool.c2c.projectors.identity import IdentityParameters, IdentityProjector
from moonpool.errors import BundleCorrupt, ConversionRefused
from tests.c2c.support import spec

SMALL = FuseParameters(
    source_layers=3,
    source_heads=2,
    source_head_dim=4,
    target_layers=2,
    target_heads=3,
    target_head_dim=8,
    hidden=16,
    intermediate=16,
    blocks=1,
    sources=[1, 2],
)
SHAPES = [
    SMALL,
    msgspec.structs.replace(SMALL, blocks=3, intermediate=40),
    msgspec.structs.replace(SMALL, source_heads=5, source_head_dim=6, target_heads=1, target_head_dim=2, hidden=24),
    msgspec.structs.replace(SMALL, source_layers=1, sources=[0, NATIVE]),
    msgspec.structs.replace(SMALL, source_heads=2, source_head_dim=64, target_heads=8, target_head_dim=128, hidden=256),
]


def random_weights(p: FuseParameters, seed: int = 0) -> list[dict[str, Tensor]]:
    """By target layer. Norm gains about 1; gates open."""
    make = torch.Generator().manual_seed(seed)

    def one(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=make)
        if name.endswith("gate_logit"):
            return noise.abs() + 0.1
        return 1 + 0.2 * noise if ".norm." in name else noise / math.sqrt(shape[-1])

    shapes = layer_shapes(p)
    return [{n: one(n, s) for n, s in shapes.items()} if source != NATIVE else {} for source in p.sources]


def reference(w: dict[str, Tensor], half: str, source: Tensor, target: Tensor, heads: int, blocks: int) -> Tensor:
    """The published formula in double precision, for `source` `[heads, tokens, dim]` and `target` likewise."""
    f = {n.removeprefix(f"{half}_"): t.double() for n, t in w.items() if n.startswith(half)}
    tokens = target.shape[1]
    flat = [x.double().transpose(0, 1).reshape(tokens, -1) for x in (source, target)]

    def ffn(block: str, x: Tensor) -> Tensor:
        rms = (x.square().mean(1, keepdim=True) + 1e-6).sqrt()
        inner = (x / rms * f[f"{block}.norm.weight"]) @ f[f"{block}.w1.weight"].T
        gelu = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        return x + gelu @ f[f"{block}.w2.weight"].T

    hidden = ffn("mlp1.blocks.0", torch.cat(flat, 1) @ f["in.weight"].T + f["in.bias"])
    feature = hidden
    for b in range(blocks):
        feature = ffn(f"proj_mlp2.blocks.{b}", feature)
    projected = (feature @ f["proj_out.weight"].T + f["proj_out.bias"]).view(tokens, heads, -1).transpose(0, 1)
    scalar = ffn("scalar_mlp2.blocks.0", hidden) @ f["scalar_head.weight"].T + f["scalar_head.bias"]
    weight = 1 / (1 + torch.exp(-scalar.T[:, :, None]))
    gate = 1.0 if f["gate_logit"].item() > 0 else 0.0
    return target.double() + gate * weight * projected


@pytest.mark.parametrize("p", SHAPES)
def test_it_is_the_published_formula(p: FuseParameters) -> None:
    weights = random_weights(p)
    fuser = build(Fuser, msgspec.to_builtins(p), Fuser(p, weights).tensors())
    make = torch.Generator().manual_seed(1)
    source = torch.randn(p.source_heads, 37, p.source_head_dim, generator=make)
    target = torch.randn(p.target_heads, 37, p.target_head_dim, generator=make)
    steps = fuser.steps()
    assert [(s.layer, s.half, s.source) for s in steps] == [
        (t, half, s) for t, s in enumerate(p.sources) if s != NATIVE for half in (0, 1)
    ]
    for step in steps:
        want = reference(weights[step.layer], ("key", "value")[step.half], source, target, p.target_heads, p.blocks)
        flat = [x.transpose(0, 1).flatten(1) for x in (source, target)]
        got = fuser.fuse(step, *flat).unflatten(-1, (p.target_heads, -1)).transpose(0, 1)
        assert got.dtype == torch.float32
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
        assert (want - target).abs().max() > 0.05, "a formula that changes nothing proves nothing"


def test_a_gate_that_is_not_above_zero_is_shut() -> None:
    weights = random_weights(SMALL)
    weights[0]["key_gate_logit"] = torch.tensor(0.0)
    weights[1]["value_gate_logit"] = torch.tensor(-3.0)
    fuser = Fuser(SMALL, weights)
    assert fuser.steps() == [FuseStep(0, 1, 1), FuseStep(1, 0, 2)]
    assert fuser.flops_per_token() * 2 == Fuser(SMALL, random_weights(SMALL)).flops_per_token()


def test_flops_are_the_published_count() -> None:
    """Qwen2.5-0.5B → Qwen3-0.6B: 478 M parameters, nearly all of them in matrices."""
    p = FuseParameters(
        source_layers=24,
        source_heads=2,
        source_head_dim=64,
        target_layers=28,
        target_heads=8,
        target_head_dim=128,
        hidden=1024,
        intermediate=1024,
        blocks=1,
        sources=[0] * 28,
    )
    one = [{n: torch.ones(()).expand(s) for n, s in layer_shapes(p).items()}]
    assert Fuser(p, one).flops_per_token() * 28 == pytest.approx(2 * 477.6e6, rel=0.002)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sources": [0]}, "impossible source layers"),
        ({"sources": [0, 3]}, "impossible source layers"),
        ({"sources": [0, -2]}, "impossible source layers"),
        ({"hidden": 0}, "projector parameter hidden"),
        ({"blocks": 2}, "weight is missing"),
        ({"target_heads": 4}, "wrong shape"),
    ],
)
def test_parameters_that_do_not_fit_are_named(change: dict[str, object], says: str) -> None:
    fuser = Fuser(SMALL, random_weights(SMALL))
    with pytest.raises(BundleCorrupt, match=says):
        build(Fuser, {**fuser.parameters(), **change}, fuser.tensors())


def test_a_fuser_is_no_projector_and_a_projector_no_fuser(tmp_path: Path) -> None:
    source, target = spec("big", layers=3, heads=2, dim=4), spec("small", layers=2, heads=3, dim=8, revision="r2")
    fuser = write_bundle(tmp_path / "fuser", Fuser(SMALL, random_weights(SMALL)), source, target, dtype=torch.float32)
    assert fuser.fuser().parameters() == msgspec.to_builtins(SMALL)
    with pytest.raises(ConversionRefused, match="half of its first matrix multiplies the target's own cache"):
        fuser.projector()
    with pytest.raises(ConversionRefused, match="mode: fuse"):
        build_projector("fuse", {}, {})
    one = spec("one", layers=1)
    identity = IdentityProjector(IdentityParameters(layers=1, width=16))
    plain = write_bundle(tmp_path / "plain", identity, one, spec("two", layers=1))
    with pytest.raises(ConversionRefused, match="nothing to add to a cache"):
        open_bundle(plain.folder).fuser()
