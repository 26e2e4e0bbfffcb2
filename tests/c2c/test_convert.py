"""Page conversion: exact where it can be, one bad page at a time, and the numbers that a direct computation gives."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from moonpool.c2c import pages as codec
from moonpool.c2c.convert import Conversion
from moonpool.c2c.projectors.identity import IdentityParameters, IdentityProjector
from moonpool.c2c.projectors.linear import LinearParameters, LinearProjector
from moonpool.c2c.rope import rotate
from moonpool.c2c.signature import ModelSpec
from moonpool.errors import ConversionRefused, MoonpoolError, WrongSize
from tests.c2c.support import ROPES, spec


def identity(of: ModelSpec) -> IdentityProjector:
    return IdentityProjector(IdentityParameters(layers=of.num_layers, width=of.num_kv_heads * of.head_dim))


def linear_identity(of: ModelSpec, shift: int = 0) -> LinearProjector:
    """An affine map with identity weights: target layer t is source layer t + shift."""
    width, layers = of.num_kv_heads * of.head_dim, of.num_layers - shift
    pair = [torch.zeros(2 * width, width) for _ in (0, 1)]
    for h in (0, 1):
        pair[h][h * width : (h + 1) * width] = torch.eye(width)
    parameters = LinearParameters(
        source_layers=of.num_layers,
        source_width=width,
        target_layers=layers,
        target_width=width,
        sources=[[[t + shift], [t + shift]] for t in range(layers)],
    )
    return LinearProjector(parameters, [pair] * layers, torch.zeros(layers, 2, width))


def random_pages(of: ModelSpec, page_size: int, count: int, seed: int = 0) -> list[bytes]:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 2, page_size, of.num_layers, of.num_kv_heads, of.head_dim)
    kv = torch.randn(shape, generator=generator) * 4
    return [bytes(codec.pack(p[0], p[1])) for p in kv]


def run(
    c: Conversion, pages: Sequence[bytes], indices: Sequence[int]
) -> tuple[list[bytes], list[MoonpoolError | None]]:
    outs = [bytearray(c.target_bytes) for _ in pages]
    errors = c.run(pages, indices, [memoryview(o) for o in outs])
    return [bytes(o) for o in outs], errors


@pytest.mark.parametrize("kind", sorted(ROPES))
def test_identity_changes_no_bit_at_any_page_size(kind: str) -> None:
    model = spec(rope=ROPES[kind], rotary_dim=4 if kind == "linear" else 8)
    for page_size in range(1, 65):
        c = Conversion(identity(model), model, model, page_size)
        pages = random_pages(model, page_size, 3)
        made, errors = run(c, pages, [0, 7, 2000])
        assert errors == [None] * 3
        assert made == pages


def test_identity_keeps_lopsided_numbers_and_signed_zeros() -> None:
    model = spec()
    page = torch.tensor([0.0, -0.0, 1e-38, -3e38, 1e30, 1.0, -1e-5, 2.0]).repeat(2, 4, 3, 2, 1)
    pages = [bytes(codec.pack(page[0], page[1]))]
    assert run(Conversion(identity(model), model, model, 4), pages, [9])[0] == pages


@pytest.mark.parametrize("first", [0, 32])
@pytest.mark.parametrize("kind", ["identity", "linear"])
def test_o3_the_same_content_under_another_rope(kind: str, first: int) -> None:
    """field-bugs O3: two configs that differ in RoPE alone; a converted key is the directly computed one."""
    source, target = spec(dim=32, rope=ROPES["default"]), spec(dim=32, rope=ROPES["llama3"])
    content = torch.randn(64, 3, 2, 32, generator=torch.Generator().manual_seed(1))
    at = torch.arange(first * 16, first * 16 + 64)
    projector = identity(source) if kind == "identity" else linear_identity(source)
    found = Conversion(projector, source, target, 16).project_kv(rotate(content, at, source.rope), content, at)
    torch.testing.assert_close(found[:, :, 0], rotate(content, at, target.rope), atol=1e-4, rtol=0)
    torch.testing.assert_close(found[:, :, 1], content, atol=1e-5, rtol=0)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 100])
def test_linear_with_identity_weights_is_native_within_a_rounding(page_size: int) -> None:
    """fp32 there and back again costs at most one bf16 step of the pair's norm."""
    model = spec(dim=16, rope=ROPES["yarn"])
    pages = random_pages(model, page_size, 5)
    made, errors = run(
        Conversion(linear_identity(model), model, model, page_size), pages, [0, 1, 2, 31, 2047 // page_size]
    )
    assert errors == [None] * 5
    for before, after in zip(pages, made, strict=True):
        k, v = (t.float() for t in codec.unpack(before, model.page_shape(page_size)))
        k2, v2 = (t.float() for t in codec.unpack(after, model.page_shape(page_size)))
        assert torch.equal(v, v2)
        norm = torch.hypot(k[..., :8], k[..., 8:])
        assert ((k - k2).abs() <= 2**-8 * torch.cat([norm, norm], -1)).all()


def test_layers_may_be_fewer_and_pages_come_from_anywhere() -> None:
    """Many pages in several groups, out of order: each is made from its own page at its own position."""
    source, target = spec(layers=4), spec(layers=3)
    c = Conversion(linear_identity(source, shift=1), source, target, 16)
    pages = random_pages(source, 16, 150)
    indices = [(37 * i) % 211 for i in range(150)]
    together, errors = run(c, pages, indices)
    assert errors == [None] * 150
    for i in (0, 3, 63, 64, 149):
        assert run(c, [pages[i]], [indices[i]])[0] == [together[i]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_poisoned_page_is_refused_alone(value: float, half: int, layer: int) -> None:
    """Layer 0 is not read by this projector; a page that holds NaN is still no page."""
    source, target = spec(layers=3), spec(layers=2)
    c = Conversion(linear_identity(source, shift=1), source, target, 4)
    pages = random_pages(source, 4, 5)
    clean, _ = run(c, pages, range(5))
    k, v = (t.clone() for t in codec.unpack(pages[2], source.page_shape(4)))
    (k, v)[half][1, layer, 0, 3] = value
    pages[2] = bytes(codec.pack(k, v))
    made, errors = run(c, pages, range(5))
    assert isinstance(errors[2], ConversionRefused)
    assert "page 2" in str(errors[2])
    assert [e for i, e in enumerate(errors) if i != 2] == [None] * 4
    assert [m for i, m in enumerate(made) if i != 2] == [m for i, m in enumerate(clean) if i != 2]


def test_a_result_out_of_range_is_refused() -> None:
    model = spec()
    p = linear_identity(model)
    huge = LinearProjector(p._p, [[w * 3e38 for w in pair] for pair in p._weights], p._biases)
    _, errors = run(Conversion(huge, model, model, 4), random_pages(model, 4, 1), [0])
    assert "not finite" in str(errors[0])


def test_wrong_sizes_are_refused_alone_with_need_and_have() -> None:
    model = spec()
    c = Conversion(identity(model), model, model, 4)
    pages = random_pages(model, 4, 3)
    pages[1] = pages[1][:-2]
    outs = [bytearray(c.target_bytes), bytearray(c.target_bytes), bytearray(c.target_bytes + 2)]
    errors = c.run(pages, [0, 1, 2], [memoryview(o) for o in outs])
    assert errors[0] is None
    assert all(isinstance(e, WrongSize) for e in errors[1:])
    assert "768 B" in str(errors[1])
    assert "766 B" in str(errors[1])
    assert bytes(outs[0]) == pages[0]


def test_nothing_to_do_is_nothing_done() -> None:
    model = spec()
    assert Conversion(identity(model), model, model, 4).run([], [], []) == []


def test_a_projector_for_other_shapes_is_refused() -> None:
    a, deeper, wider, split = spec(), spec(layers=4), spec(heads=3), spec(heads=4, dim=4)
    for source, target in ((deeper, a), (a, deeper), (wider, a), (a, wider)):
        with pytest.raises(ConversionRefused, match="shape"):
            Conversion(identity(a), source, target, 4)
    with pytest.raises(ConversionRefused, match="head_dim=8"):
        Conversion(identity(a), a, split, 4)
    Conversion(linear_identity(a), a, split, 4)


def test_threads_do_not_share_scratch() -> None:
    model = spec(layers=6, dim=32)
    c = Conversion(linear_identity(model), model, model, 16)
    work = [random_pages(model, 16, 40, seed=s) for s in range(4)]
    want = [run(c, pages, range(40))[0] for pages in work]
    found: dict[int, list[bytes]] = {}

    def go(i: int) -> None:
        for _ in range(3):
            found[i] = run(c, work[i], range(40))[0]

    threads = [threading.Thread(target=go, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [found[i] for i in range(4)] == want
