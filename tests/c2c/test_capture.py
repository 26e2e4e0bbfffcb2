"""Captured KV is the model's own; injected KV gives the model's own logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moonpool.c2c.fitting.capture import KV, CaptureStore, CausalModel
from moonpool.errors import ModelError
from tests.c2c.tiny import FAMILIES, documents, tiny_model


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model", request.param)


def reference(folder: Path, tokens: torch.Tensor) -> tuple[KV, torch.Tensor]:
    """(unrounded KV, logits) of one plain pass by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        out = model(input_ids=tokens[None], use_cache=True)
    layers = out.past_key_values.layers
    k, v = (torch.stack([getattr(la, name)[0] for la in layers]).permute(2, 0, 1, 3) for name in ("keys", "values"))
    return KV(k, v), out.logits[0]


def test_kv_is_what_a_plain_pass_leaves_in_the_cache(folder: Path) -> None:
    (tokens,) = documents(1, 70)
    kv, _ = reference(folder, tokens)
    found = CausalModel(folder).kv(tokens)
    assert found.k.dtype == torch.bfloat16
    torch.testing.assert_close(found.k, kv.k.bfloat16())
    torch.testing.assert_close(found.v, kv.v.bfloat16())


def test_kv_does_not_depend_on_the_chunk(folder: Path) -> None:
    (tokens,) = documents(1, 70)
    model = CausalModel(folder)
    whole, pieces = model.kv(tokens), model.kv(tokens, chunk=16)
    torch.testing.assert_close(
        whole.k, pieces.k, rtol=1e-2, atol=1e-2
    )  # one bf16 step where a rounding falls otherwise


def test_logits_over_an_injected_prefix_equal_the_full_run(folder: Path) -> None:
    (tokens,) = documents(1, 70)
    kv, logits = reference(folder, tokens)
    found = CausalModel(folder).logits(kv[:48], tokens[48:])
    torch.testing.assert_close(found, logits[48:], rtol=1e-4, atol=1e-4)


def test_a_rounded_prefix_gives_the_same_logits_however_it_came(folder: Path) -> None:
    (tokens,) = documents(1, 70)
    kv, _ = reference(folder, tokens)
    model = CausalModel(folder)
    injected, captured = model.logits(kv[:48].rounded(), tokens[48:]), model.logits(model.kv(tokens)[:48], tokens[48:])
    torch.testing.assert_close(injected, captured)


def test_batched_continuations_equal_single_ones(folder: Path) -> None:
    (tokens,) = documents(1, 70)
    model = CausalModel(folder)
    prefix = model.kv(tokens[:32])
    rows = [tokens[32:40], tokens[40:43], tokens[50:51]]
    for row, found in zip(rows, model.batch_logits(prefix, rows), strict=True):
        torch.testing.assert_close(found, model.logits(prefix, row), rtol=1e-4, atol=1e-4)


def test_a_later_start_leaves_a_gap_in_the_positions(folder: Path) -> None:
    (tokens,) = documents(1, 40)
    model = CausalModel(folder)
    prefix = model.kv(tokens[:16])
    near, far = model.logits(prefix, tokens[16:]), model.logits(prefix, tokens[16:], start=300)
    assert (near - far).abs().max() > 1e-3


def test_attention_outputs_come_per_layer_and_stop_with_the_block(folder: Path) -> None:
    (tokens,) = documents(1, 20)
    model = CausalModel(folder)
    with model.attention_outputs() as seen:
        model.logits(None, tokens)
    assert [tuple(t.shape) for t in seen] == [(1, 20, 64)] * 3
    model.logits(None, tokens)
    assert len(seen) == 3


def test_attention_mass_counts_later_tokens_only(folder: Path) -> None:
    (tokens,) = documents(1, 20)
    model = CausalModel(folder)
    before = model.logits(None, tokens)
    mass = model.attention_mass(tokens)
    assert mass.shape == (3, 20)
    assert mass[:, -1].abs().max() == 0, "nobody stands behind the last token"
    assert (mass.sum(1) < 19).all(), "a query gives 1 in all, some of it to itself"
    torch.testing.assert_close(model.logits(None, tokens), before)


def test_a_second_store_reads_what_the_first_kept(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    (tokens,) = documents(1, 40)
    first = CaptureStore(tmp_path / "kept", folder).get(tokens)
    again = CaptureStore(tmp_path / "kept", folder)
    second = again.get(tokens)
    assert "model" not in vars(again), "nothing was missing, so no model was loaded"
    torch.testing.assert_close(first.k, second.k)
    assert again.path(tokens) != again.path(tokens[:-1])


def test_a_folder_without_a_model_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        CausalModel(tmp_path)
