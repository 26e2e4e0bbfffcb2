"""Rotary embeddings: the same numbers as transformers', and taken off as exactly as fp32 can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonpool.c2c.rope import attention_factor, inverse_frequencies, rotate, rotate_between, unrotate
from moonpool.c2c.signature import RopeSpec
from tests.c2c.support import ROPES, with_dim


@st.composite
def ropes(draw: st.DrawFn) -> tuple[RopeSpec, int]:
    """(embedding, head_dim): every kind, partial rotation too."""
    base = draw(st.sampled_from(sorted(ROPES)))
    dim = draw(st.sampled_from([8, 16, 64, 128]))
    rotary = draw(st.sampled_from([dim, dim // 2]))
    rope = with_dim(ROPES[base], rotary)
    values = {"theta": draw(st.sampled_from([1e4, 5e5, 1e6, 1e8])), "factor": draw(st.floats(1.0, 32.0))}
    fields = {f: getattr(rope, f) for f in RopeSpec.__struct_fields__}
    return RopeSpec(**fields | (values if base != "default" else {"theta": values["theta"]})), dim


def keys(n: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, 2, dim, generator=torch.Generator().manual_seed(seed))


def pair_norms(k: Tensor, rotary: int) -> Tensor:
    """Norm of each rotated pair, for every one of its two components."""
    half = rotary // 2
    norm = torch.hypot(k[..., :half], k[..., half:rotary])
    return torch.cat([norm, norm, k[..., rotary:].abs()], -1)


@settings(max_examples=60, deadline=None)
@given(ropes(), st.integers(0, 130_000), st.integers(0, 99))
def test_unrotate_is_the_inverse_of_rotate(drawn: tuple[RopeSpec, int], offset: int, seed: int) -> None:
    rope, dim = drawn
    k = keys(16, dim, seed)
    at = torch.arange(offset, offset + 16)
    back = unrotate(rotate(k, at, rope), at, rope)
    assert ((back - k).abs() <= 1e-6 * pair_norms(k, rope.rotary_dim)).all()


@settings(max_examples=40, deadline=None)
@given(ropes(), ropes(), st.integers(0, 30_000))
def test_rotating_between_is_unrotating_and_rotating(
    a: tuple[RopeSpec, int], b: tuple[RopeSpec, int], offset: int
) -> None:
    source, dim = a
    target = with_dim(b[0], source.rotary_dim)
    content = keys(8, dim)
    at = torch.arange(offset, offset + 8)
    direct = rotate_between(rotate(content, at, source), at, source, target)
    want = rotate(content, at, target)
    assert ((direct - want).abs() <= 1e-6 * pair_norms(want, source.rotary_dim).clamp_min(1e-6)).all()


@settings(max_examples=40, deadline=None)
@given(ropes(), st.integers(0, 200_000))
def test_rotating_between_equal_embeddings_changes_no_bit(drawn: tuple[RopeSpec, int], offset: int) -> None:
    rope, dim = drawn
    k = keys(8, dim)
    k[0, 0, 0] = torch.tensor([0.0, -0.0, 1e-38, -1e-45, 3e38, -3e38, 1.0, 2**-126] * (dim // 8))
    same = rotate_between(k, torch.arange(offset, offset + 8), rope, with_dim(rope, rope.rotary_dim))
    assert torch.equal(same.view(torch.int32), k.view(torch.int32))


def test_equal_embeddings_that_are_spelt_differently_change_no_bit() -> None:
    k = torch.zeros(4, 1, 1, 8).neg()
    plain, spelt = RopeSpec(1e4, rotary_dim=8), RopeSpec(1e4, kind="linear", rotary_dim=8, factor=1.0)
    same = rotate_between(k, torch.arange(4), plain, spelt)
    assert torch.equal(same.view(torch.int32), k.view(torch.int32))


def test_keys_in_half_precision_of_a_pair_survive_only_the_relative_rotation() -> None:
    """Why `rotate_between` exists: fp32 there and back loses the smaller component of a lopsided pair."""
    rope = RopeSpec(1e4, rotary_dim=8)
    k = keys(64, 8)
    k[..., :4] *= 2**12
    at = torch.arange(1000, 1064)
    there_and_back = rotate(unrotate(k, at, rope), at, rope)
    assert not torch.equal(there_and_back.bfloat16(), k.bfloat16())
    assert torch.equal(rotate_between(k, at, rope, rope), k)


@pytest.mark.parametrize("offset", [0, 512])
def test_o3_keys_follow_the_target_rope(offset: int) -> None:
    """field-bugs O3: two configs that differ in the base only; the converted key is the directly computed one."""
    source, target = RopeSpec(1e4, rotary_dim=64), RopeSpec(1e6, rotary_dim=64)
    content, at = keys(32, 64), torch.arange(offset, offset + 32)
    stored = rotate(content, at, source)
    want = rotate(content, at, target)
    torch.testing.assert_close(rotate_between(stored, at, source, target), want, atol=1e-4, rtol=0)
    torch.testing.assert_close(rotate(unrotate(stored, at, source), at, target), want, atol=1e-4, rtol=0)
    assert (stored - want).abs().max() > 1, "without un-rotation the keys would be others altogether"


SCALED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn with mscale": {"factor": 8.0, "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn untruncated": {"factor": 8.0, "original_max_position_embeddings": 4096, "truncate": False, "beta_fast": 16.0},
    "yarn with factor": {"factor": 8.0, "original_max_position_embeddings": 4096, "attention_factor": 1.3},
}


def _theirs(name: str, partial: float) -> tuple[Any, RopeSpec]:
    from transformers import LlamaConfig

    from moonpool.c2c.signature import _rope

    kind = name.split()[0]
    rope = {"rope_type": kind, "rope_theta": 500000.0, "partial_rotary_factor": partial, **SCALED[name]}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=32768, head_dim=64, rope_parameters=dict(rope)
    )
    raw = {"max_position_embeddings": 32768, "rope_parameters": rope}
    return config, _rope("m", raw, 64)


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("name", sorted(SCALED.keys() - {"default"}))
def test_frequencies_and_factor_are_transformers_own(name: str, partial: float) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config, ours = _theirs(name, partial)
    frequencies, factor = ROPE_INIT_FUNCTIONS[ours.kind](config, "cpu")
    torch.testing.assert_close(inverse_frequencies(ours).float(), frequencies, rtol=3e-6, atol=1e-12)
    assert attention_factor(ours) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("name", sorted(SCALED))
def test_rotation_is_transformers_own(name: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config, ours = _theirs(name, 1.0)
    content = keys(48, 64)
    at = torch.arange(16, 64)
    cos, sin = LlamaRotaryEmbedding(config)(content, at[None])
    heads = content.flatten(1, 2).transpose(0, 1)[None]
    _, theirs = apply_rotary_pos_emb(heads, heads, cos, sin)
    mine = rotate(content, at, ours).flatten(1, 2).transpose(0, 1)[None]
    torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-5)


def test_angles_far_out_are_not_rounded() -> None:
    """At position 1 000 000 an fp32 angle has lost three digits; ours is made in fp64."""
    rope = RopeSpec(1e4, rotary_dim=8)
    k = torch.zeros(1, 1, 1, 8)
    k[..., 0] = 1
    turned = rotate(k, torch.tensor([1_000_001]), rope)
    angle = torch.tensor(1_000_001, dtype=torch.float64)
    assert turned[0, 0, 0, 0].item() == pytest.approx(float(angle.cos()), abs=1e-7)
    assert turned[0, 0, 0, 4].item() == pytest.approx(float(angle.sin()), abs=1e-7)
