"""The rounding invariant and ragged batches, against plain Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicLayer

from moonpool.c2c.signature import load_spec
from moonpool.engine.model import Runner, compute_dtype
from moonpool.errors import ModelError
from tests.engine.conftest import PAGE, prompt


class RoundingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        return super().update(key_states.bfloat16().float(), value_states.bfloat16().float(), *args, **kwargs)


@pytest.fixture(scope="module")
def runner(any_model: Path) -> Runner:
    return Runner(str(any_model), load_spec(any_model), page_size=PAGE, compute="float32")


@torch.inference_mode()
def test_prefill_equals_transformers_with_a_rounding_cache(any_model: Path, runner: Runner) -> None:
    reference = AutoModelForCausalLM.from_pretrained(any_model, dtype=torch.float32)
    tokens = prompt(50)
    cache = {runner._cache_name: Cache(layer_class_to_replicate=RoundingLayer)}
    want = reference(torch.tensor([tokens]), **cache).logits[0]
    kv = runner.new_sequence(8)
    got = torch.cat([runner.forward([kv], [tokens[a : a + 20]], keep=20)[0] for a in (0, 20, 40)])
    torch.testing.assert_close(got[-50:], want, atol=1e-4, rtol=1e-4)


def test_everything_in_the_cache_is_a_bf16_number(runner: Runner) -> None:
    kv = runner.new_sequence(8)
    runner.forward([kv], [prompt(40)], keep=0)
    for half in kv.tokens(0, 40):
        assert torch.equal(half, half.bfloat16().float())


def test_a_ragged_batch_equals_its_rows_alone(runner: Runner) -> None:
    lengths = (3, 40, 17)
    alone, batch = [], []
    for n in lengths:
        kv, other = runner.new_sequence(64), runner.new_sequence(64)
        for one in (kv, other):
            runner.forward([one], [prompt(n, seed=n)], keep=0)
        alone.append(runner.forward([kv], [[9]], keep=1)[0])
        batch.append(other)
    together = runner.forward(batch, [[9]] * 3, keep=1)
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-4, rtol=1e-4)
    assert [kv.length for kv in batch] == [n + 1 for n in lengths]


def test_growing_keeps_old_views_right(runner: Runner) -> None:
    kv = runner.new_sequence(16)
    runner.forward([kv], [prompt(16)], keep=0)
    k, _ = kv.tokens(0, 16)
    before = k.clone()
    runner.forward([kv], [prompt(100, seed=1)], keep=0)
    assert kv.capacity >= 116
    assert torch.equal(k, before)
    assert torch.equal(kv.tokens(0, 16)[0], before)


def test_the_compute_type_is_decided_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True}, raising=False)
    assert compute_dtype("auto", cpu) == (torch.bfloat16, "this CPU has bf16 units (amx_bf16)")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    assert compute_dtype("auto", cpu)[0] is torch.float32
    assert compute_dtype("bfloat16", cpu) == (torch.bfloat16, "as configured")


def test_a_folder_without_a_model_is_a_model_error(any_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot load the model"):
        Runner(str(tmp_path), load_spec(any_model), page_size=PAGE)
