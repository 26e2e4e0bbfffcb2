"""Model parameters come from the model's own files, and what cannot be converted is refused with the reason."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from moonpool import paths
from moonpool.c2c.signature import check_contract, check_pair, differences, load_spec, tokenizer_digest
from moonpool.errors import ConversionRefused, ModelError
from moonpool.types import PageShape
from tests.c2c.support import TOKENIZER, model_folder, spec

QWEN = paths.models_dir() or Path("MOONPOOL_MODELS is not set")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_CACHE", str(tmp_path / "cache"))


def test_parameters_of_a_folder(tmp_path: Path) -> None:
    found = load_spec(model_folder(tmp_path / "m"))
    assert (found.name, found.model_type) == ("m", "qwen2")
    assert (found.num_layers, found.num_heads, found.num_kv_heads, found.head_dim, found.hidden) == (3, 4, 2, 16, 64)
    assert (found.rope.kind, found.rope.theta, found.rope.rotary_dim) == ("default", 1e6, 16)
    assert not found.qk_norm
    assert found.page_shape(16) == PageShape(16, 3, 2, 16)
    identity = found.identity(16, tenant="a")
    assert (identity.layer_end, identity.page_size, identity.tenant) == (3, 16, "a")
    assert identity.revision == found.revision


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_agrees_with_transformers(tmp_path: Path, model_type: str) -> None:
    from transformers import AutoConfig

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    theirs = AutoConfig.for_model(model_type, **sizes, head_dim=32, sliding_window=None)
    folder = model_folder(tmp_path / "m")
    theirs.save_pretrained(folder)
    ours = load_spec(folder)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == 32
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.qk_norm == (model_type == "qwen3")


def test_old_and_new_spelling_of_rope_agree(tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 128}
    new = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **scaling}}
    old = {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": {"type": "yarn", **scaling}}
    ropes = [load_spec(model_folder(tmp_path / n, c)).rope for n, c in (("new", new), ("old", old))]
    assert ropes[0] == ropes[1]
    assert (ropes[0].kind, ropes[0].factor, ropes[0].original_max_positions) == ("yarn", 4.0, 128)


def test_a_longer_context_alone_is_the_same_rope(tmp_path: Path) -> None:
    short = load_spec(model_folder(tmp_path / "a"))
    long = load_spec(model_folder(tmp_path / "b", {"max_position_embeddings": 4096}))
    assert short.rope == long.rope


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"layer_types": ["linear_attention", "full_attention", "full_attention"]}, "linear_attention"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding-window"),
        ({"model_type": "mistral"}, "sliding-window"),
        ({"quantization_config": {"kv_cache_scheme": {"type": "float"}}}, "quantised"),
        ({"quantization_config": {"kv_cache_quant_algo": "FP8"}}, "quantised"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual-chunk"),
        ({"model_type": "mamba"}, "mamba"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "depend on the sequence's length"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "depend on the sequence's length"),
        ({"rope_parameters": {"rope_type": "yarn"}, "max_position_embeddings": "many"}, "positive whole number"),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "impossible rotary"),
        ({"rope_parameters": "none"}, "config.json"),
        ({"num_hidden_layers": ...}, "lacks num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": ...}, "lacks num_key_value_heads"),
        ({"model_type": "qwen3"}, "lacks head_dim"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_the_reason(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        load_spec(model_folder(tmp_path / "m", change))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / name).unlink()
    with pytest.raises(ModelError, match=name.split(".")[1]):
        load_spec(folder)


def test_damaged_json_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "config.json").write_text('{"a":')
    with pytest.raises(ModelError, match=r"config\.json"):
        load_spec(folder)


def test_offline_hub_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="hub"):
        load_spec("no-such-org/no-such-model")


def test_pickled_weights_are_no_weights(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        load_spec(folder)


def test_revision_follows_the_weights_not_the_folder(tmp_path: Path) -> None:
    a, b, c = (load_spec(model_folder(tmp_path / n, seed=s)) for n, s in (("a", 1), ("b", 1), ("c", 2)))
    assert a.revision == b.revision != c.revision


def test_revision_is_cached_but_a_swapped_file_is_seen(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", seed=1)
    first = load_spec(folder).revision
    before = (folder / "model.safetensors").stat()
    assert load_spec(folder).revision == first
    model_folder(folder, seed=2)
    os.utime(folder / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load_spec(folder).revision != first, "same size and modification time, other weights"


def test_a_damaged_revision_cache_is_not_believed(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    first = load_spec(folder).revision
    for kept in (tmp_path / "cache" / "revisions").iterdir():
        kept.write_text("")
    assert load_spec(folder).revision == first


def test_tokenizer_digest_counts_content_only() -> None:
    same = json.loads(json.dumps(TOKENIZER, indent=4))
    same |= {"version": "2.0", "padding": {"length": 4}, "decoder": {"type": "Fuse"}}
    same["model"] = {"merges": [["a", "b"]], "vocab": {"ab": 2, "b": 1, "a": 0}, "type": "BPE", "byte_fallback": False}
    assert tokenizer_digest(same) == tokenizer_digest(TOKENIZER)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFKC"}},
        {"added_tokens": []},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
        {"post_processor": {"type": "TemplateProcessing"}},
        {"model": {**TOKENIZER["model"], "merges": []}},
        {"model": {**TOKENIZER["model"], "vocab": {"a": 1, "b": 0, "ab": 2}}},
    ],
)
def test_tokenizer_digest_sees_what_decides_ids(change: dict[str, Any]) -> None:
    assert tokenizer_digest({**TOKENIZER, **change}) != tokenizer_digest(TOKENIZER)


def test_differences_name_nested_fields() -> None:
    a, b = spec("a"), spec("b", rotary_dim=4, layers=5)
    found = differences(a, b)
    assert [d.field for d in found] == ["num_layers", "rope.rotary_dim"]
    with pytest.raises(ConversionRefused, match=r"num_layers, rope\.rotary_dim.*num_layers=3.*num_layers=5"):
        check_contract("source", found)
    check_contract("source", differences(a, a))


def test_a_pair_must_share_the_tokenizer() -> None:
    check_pair(spec("a"), spec("b", layers=7))
    with pytest.raises(ConversionRefused, match="tokenizer"):
        check_pair(spec("a"), spec("b", tokenizer="t2"))


@pytest.mark.skipif(not (QWEN / "qwen2.5-coder-0.5b-instruct").is_dir(), reason="Qwen2.5-Coder folders are not here")
def test_qwen_coder_models_share_a_tokenizer() -> None:
    digests = {
        tokenizer_digest(json.loads((QWEN / f"qwen2.5-coder-{size}-instruct" / "tokenizer.json").read_bytes()))
        for size in ("0.5b", "1.5b")
    }
    assert len(digests) == 1
