"""The proof behind an alias: what it accepts, what it refuses by name, and that a rule goes nowhere without it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from moonpool.c2c.alias import Proof, equal_tokens, read_proof
from moonpool.c2c.commands import app
from moonpool.c2c.config import AliasEntry, C2CConfig, C2CFile, ModelEntry, RuleEntry, check, load_c2c
from moonpool.c2c.prove import prove
from moonpool.errors import ConfigError, ConversionRefused, ModelError
from tests.c2c.tiny import tiny_model

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("alias") / "base", layers=2)


def copy_of(base: Path, folder: Path, change: Callable[[Weights], Any] = lambda _: None) -> Path:
    """The model under another name, with changed weights."""
    shutil.copytree(base, folder)
    weights = load_file(base / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def add(name: str, amount: float = 1.0) -> Callable[[Weights], Any]:
    return lambda weights: weights[name].add_(amount)


def reconfigured(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def adapted(base: Path, folder: Path, **changes: Any) -> Path:
    """The base with an adapter beside it, as PEFT lays it out."""
    shutil.copytree(base, folder)
    config = {
        "peft_type": "LORA",
        "bias": "none",
        "modules_to_save": None,
        "alora_invocation_tokens": [7, 9],
        **changes,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    lora = {"base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight": torch.ones(4, 64)}
    save_file(lora, folder / "adapter_model.safetensors")
    return folder


# -- the proof


def test_another_head_is_the_same_kv(base: Path, tmp_path: Path) -> None:
    other = copy_of(base, tmp_path / "other", add("lm_head.weight"))
    proof = prove(base, other)
    assert proof.source.revision != proof.target.revision
    assert proof.tensors == len(load_file(base / "model.safetensors")) - 1
    assert (proof.tokens, proof.until) == (192, [])
    assert proof == prove(base, other), "the same models, the same proof"


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.self_attn.k_norm.weight",
    ],
)
def test_one_changed_weight_is_named(base: Path, tmp_path: Path, name: str) -> None:
    def one(weights: Weights) -> None:
        weights[name].view(-1)[-3] *= 1.0001

    with pytest.raises(ConversionRefused, match=f"weights: {name} differs$"):
        prove(base, copy_of(base, tmp_path / "other", one))


def test_missing_and_further_weights_are_named(base: Path, tmp_path: Path) -> None:
    def rename(weights: Weights) -> None:
        weights["model.layers.0.extra.weight"] = weights.pop("model.layers.0.mlp.up_proj.weight")

    says = "extra.weight is not in the source, model.layers.0.mlp.up_proj.weight is not in the target"
    with pytest.raises(ConversionRefused, match=says):
        prove(base, copy_of(base, tmp_path / "other", rename))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_theta": 5e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}, "rope.theta"),
        ({"rms_norm_eps": 1e-5}, "config.rms_norm_eps"),
        ({"hidden_act": "gelu"}, "config.hidden_act"),
        ({"num_key_value_heads": 4}, "num_kv_heads"),
        ({"num_hidden_layers": 1}, "num_layers"),
    ],
)
def test_a_config_that_can_touch_kv_is_named(base: Path, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    other = copy_of(base, tmp_path / "other")
    reconfigured(other, **change)
    with pytest.raises(ConversionRefused, match=says):
        prove(base, other)


def test_a_config_that_cannot_is_not(base: Path, tmp_path: Path) -> None:
    other = copy_of(base, tmp_path / "other")
    reconfigured(other, max_position_embeddings=2048, eos_token_id=3, _name_or_path="elsewhere")
    assert prove(base, other, tokens=8).tensors > 0


def test_kv_is_compared_as_well(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever makes equal weights give other KV: both models are run."""
    other = copy_of(base, tmp_path / "other", add("model.layers.1.self_attn.v_proj.weight", 0.01))
    monkeypatch.setattr("moonpool.c2c.prove._equal_weights", lambda *_: {})
    with pytest.raises(ConversionRefused, match="the values of layer 1 differ"):
        prove(base, other, tokens=8)


def test_an_adapter_that_waits_for_its_invocation(base: Path, tmp_path: Path) -> None:
    folder = adapted(base, tmp_path / "adapted")
    proof = prove(base, folder, tokens=32)
    assert proof.until == [[7, 9]]
    assert proof.target.adapter_config
    assert prove(folder, base, tokens=32).until == [[7, 9]], "the other way the limit is the same"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"alora_invocation_tokens": None}, "acts from the first token on"),
        ({"alora_invocation_tokens": []}, "acts from the first token on"),
        ({"modules_to_save": ["embed_tokens"]}, "more than what waits for its invocation; there is modules_to_save"),
        ({"bias": "all"}, "there is bias"),
    ],
)
def test_adapters_that_always_act(base: Path, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConversionRefused, match=says):
        prove(base, adapted(base, tmp_path / "adapted", **change))


def test_an_adapter_config_that_is_none(base: Path, tmp_path: Path) -> None:
    folder = adapted(base, tmp_path / "adapted")
    (folder / "adapter_config.json").write_text("[1]")
    with pytest.raises(ModelError, match="unreadable adapter config"):
        prove(base, folder)


def test_how_far_an_alias_reaches() -> None:
    tokens = [1, 7, 7, 9, 2, 3, 7, 9]
    assert equal_tokens(tokens, []) == 8
    assert equal_tokens(tokens, [[7, 9]]) == 2
    assert equal_tokens(tokens, [[7, 9], [1, 7]]) == 0
    assert equal_tokens(tokens, [[9, 7]]) == 8
    assert equal_tokens([1, 7], [[7, 9]]) == 2, "a sequence that is cut off invokes nothing"


# -- the config


@pytest.fixture(scope="module")
def proven(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models of equal KV, and the file that aliases them."""
    root = tmp_path_factory.mktemp("proven")
    shutil.copytree(base, root / "base")
    copy_of(base, root / "other", add("lm_head.weight"))
    models = ["--source", f"{root}/base", "--target", f"{root}/other"]
    result = CliRunner().invoke(app, ["prove-alias", *models, "--out", f"{root}/proof.json", "--tokens", "16"])
    assert result.exit_code == 0, result.output
    assert "KV of 16 tokens equal bit for bit" in result.output
    write_config(root, "{source: base, target: other, proof: proof.json, until: [5, 6]}")
    return root


def write_config(root: Path, alias: str) -> None:
    models = "models: {base: {ref: base}, other: {ref: other}}"
    (root / "c2c.yaml").write_text(f"{models}\npage_size: 4\naliases:\n  - {alias}\n")


def test_a_proven_alias(proven: Path) -> None:
    config = load_c2c(proven / "c2c.yaml")
    (alias,) = config.aliases
    assert (alias.source.name, alias.target.name, alias.until) == ("base", "other", [[5, 6]])
    assert config.rules == [], "the converter has nothing to do with it"
    assert C2CConfig.decode(config.encode()).aliases == config.aliases


def test_the_command_names_what_differs(base: Path, tmp_path: Path) -> None:
    other = copy_of(base, tmp_path / "other", add("model.layers.0.mlp.up_proj.weight"))
    models = ["--source", f"{base}", "--target", f"{other}"]
    result = CliRunner().invoke(app, ["prove-alias", *models, "--out", f"{tmp_path}/proof.json"])
    assert result.exit_code == 2
    assert "model.layers.0.mlp.up_proj.weight differs" in result.output
    assert not (tmp_path / "proof.json").exists()


@pytest.fixture
def loose(proven: Path, tmp_path: Path) -> Path:
    """A copy of the folder, to be damaged."""
    shutil.copytree(proven, tmp_path / "loose")
    return tmp_path / "loose"


def edit_proof(root: Path, **changes: Any) -> None:
    proof = read_proof(root / "proof.json")
    (root / "proof.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(proof, **changes)))


def test_weights_that_changed_since_are_refused(loose: Path) -> None:
    weights = load_file(loose / "other" / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] += 1
    save_file(weights, loose / "other" / "model.safetensors")
    with pytest.raises(ConversionRefused, match=r"proves it of other models: differs in target.revision"):
        load_c2c(loose / "c2c.yaml")


def test_a_config_that_changed_since_is_refused(loose: Path) -> None:
    reconfigured(loose / "base", rms_norm_eps=1e-5)
    with pytest.raises(ConversionRefused, match=r"differs in source.config;"):
        load_c2c(loose / "c2c.yaml")


def test_a_proof_the_other_way_round_is_none(loose: Path) -> None:
    write_config(loose, "{source: other, target: base, proof: proof.json}")
    with pytest.raises(ConversionRefused, match=r"source.revision, target.revision"):
        load_c2c(loose / "c2c.yaml")


def test_an_edited_proof_is_none(loose: Path) -> None:
    edit_proof(loose, until=[[1]])
    with pytest.raises(ConfigError, match="the proof was changed"):
        load_c2c(loose / "c2c.yaml")


def test_proofs_that_are_none(loose: Path) -> None:
    (loose / "proof.json").write_text('{"format": 1}')
    with pytest.raises(ConfigError, match="not a proof"):
        load_c2c(loose / "c2c.yaml")
    (loose / "proof.json").unlink()
    with pytest.raises(ConfigError, match="prove-alias"):
        load_c2c(loose / "c2c.yaml")


def test_a_proof_of_another_format(loose: Path) -> None:
    sealed: Proof = msgspec.structs.replace(read_proof(loose / "proof.json"), format=2).sealed()
    edit_proof(loose, format=2, digest=sealed.digest)
    with pytest.raises(ConfigError, match="proof of another format"):
        load_c2c(loose / "c2c.yaml")


def alias(source: str, target: str, **changes: Any) -> AliasEntry:
    return AliasEntry(source=source, target=target, proof="p", **changes)


@pytest.mark.parametrize(
    ("aliases", "says"),
    [
        ([alias("a", "nobody")], "unknown model `nobody`"),
        ([alias("a", "a")], "no alias of itself"),
        ([alias("a", "b"), alias("a", "b")], "second alias for a → b"),
        ([alias("a", "c")], "a rule and an alias for a → c"),
        ([alias("a", "b", until=[-1])], "until holds no token ids"),
    ],
)
def test_mistakes_are_named(aliases: list[AliasEntry], says: str) -> None:
    rules = [RuleEntry(source="a", target="c", bundle="x")]
    file = C2CFile(models={n: ModelEntry(n) for n in "abc"}, rules=rules, aliases=aliases)
    with pytest.raises(ConfigError, match=says):
        check(file)


def test_aliases_may_go_both_ways() -> None:
    check(C2CFile(models={n: ModelEntry(n) for n in "ab"}, aliases=[alias("a", "b"), alias("b", "a")]))
