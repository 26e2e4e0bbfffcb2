"""Published checkpoints: the files as they are laid out, and everything that can be wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from moonpool.c2c.bundle import open_bundle, write_bundle
from moonpool.c2c.commands import app
from moonpool.c2c.official import read_checkpoint
from moonpool.c2c.projectors.fuse import NATIVE, FuseParameters
from moonpool.c2c.signature import load_spec
from moonpool.errors import BundleCorrupt, ConversionRefused, MoonpoolError
from tests.c2c.support import spec
from tests.c2c.test_fuse import random_weights
from tests.c2c.tiny import tiny_model

SHAPE = FuseParameters(
    source_layers=4,
    source_heads=2,
    source_head_dim=16,
    target_layers=3,
    target_heads=2,
    target_head_dim=8,
    hidden=24,
    intermediate=32,
    blocks=2,
    sources=[1, 2, 3],
)
SOURCE = spec("sharer", layers=4, heads=2, dim=16)
TARGET = spec("receiver", layers=3, heads=2, dim=8, revision="r2")
INIT = {
    "source_dim": 16,
    "target_dim": 8,
    "source_num_heads": 2,
    "target_num_heads": 2,
    "intermediate_dim": 32,
    "hidden_dim": 24,
    "num_layers": 4,
    "dropout": 0.1,
    "initial_temperature": 1.0,
    "final_temperature": 0.001,
    "anneal_steps": 1929,
    "dtype": {"__type__": "torch.dtype", "value": "bfloat16"},
}


def publish(
    folder: Path, dtype: torch.dtype = torch.bfloat16, shape: FuseParameters = SHAPE
) -> list[dict[str, Tensor]]:
    """A folder as the reference code writes it. Returns the weights, by projector."""
    folder.mkdir(parents=True)
    weights = [{n: w.to(dtype) for n, w in layer.items()} for layer in random_weights(shape) if layer]
    for i, layer in enumerate(weights):
        torch.save({**layer, "gate_temperature": torch.tensor(0.001, dtype=dtype)}, folder / f"projector_{i}.pt")
        (folder / f"projector_{i}.json").write_text(json.dumps({"class": "C2CProjector", "init_args": INIT}))
    mapped = [(t, s) for t, s in enumerate(shape.sources) if s != NATIVE]
    layers = {str(t): [[s, i]] for i, (t, s) in enumerate(mapped)}
    (folder / "projector_config.json").write_text(json.dumps({"0": {"1": layers}}))
    (folder / "config.json").write_text("{}")
    return weights


def test_what_was_published_is_what_the_bundle_holds(tmp_path: Path) -> None:
    weights = publish(tmp_path / "pair_Fuser" / "final")
    found = read_checkpoint(tmp_path / "pair_Fuser", SOURCE, TARGET)
    assert found.fuser.shape == SHAPE
    assert found.notes == []
    bundle = write_bundle(tmp_path / "bundle", found.fuser, SOURCE, TARGET, dtype=found.dtype)
    held = bundle.fuser().tensors()
    assert held.keys() == {f"layers.{t}.{n}" for t, layer in enumerate(weights) for n in layer}
    for t, layer in enumerate(weights):
        for name, weight in layer.items():
            assert torch.equal(held[f"layers.{t}.{name}"], weight.float()), name
    assert bundle.manifest.kind == "fuse"
    bundle.check(SOURCE, TARGET, 16)


def test_weights_in_fp32_stay_exact(tmp_path: Path) -> None:
    weights = publish(tmp_path / "f", torch.float32)
    found = read_checkpoint(tmp_path / "f", SOURCE, TARGET)
    held = write_bundle(tmp_path / "b", found.fuser, SOURCE, TARGET, dtype=found.dtype).fuser().tensors()
    assert torch.equal(held["layers.2.value_proj_out.weight"], weights[2]["value_proj_out.weight"])


def test_layers_without_a_fuser_stay_native_and_old_files_are_noted(tmp_path: Path) -> None:
    shape = msgspec.structs.replace(SHAPE, sources=[NATIVE, 0, 3])
    publish(tmp_path / "f", shape=shape)
    for name in ("aggregator_0.pt", "aggregator_0.json", "aggregator_config.json", "training_state.pt"):
        (tmp_path / "f" / name).write_bytes(b"never opened")
    (tmp_path / "f" / "projector_7.pt").write_bytes(b"never opened")
    found = read_checkpoint(tmp_path / "f", SOURCE, TARGET)
    assert found.fuser.shape.sources == [NATIVE, 0, 3]
    assert [n.split(":")[0] for n in found.notes] == [
        "1 target layers have no fuser and stay native",
        "not used (older releases, training)",
        "no layer uses projector 7",
    ]


# -- what can be wrong

Damage = Callable[[Path], Any]


def weights_of(change: Callable[[dict[str, Tensor]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        state = torch.load(folder / "projector_1.pt", weights_only=True)
        change(state)
        torch.save(state, folder / "projector_1.pt")

    return damage


def text_of(name: str, change: Callable[[Any], Any]) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(change(content)))

    return damage


def init(**changes: Any) -> Damage:
    return text_of("projector_1.json", lambda d: {**d, "init_args": {**d["init_args"], **changes}})


def layers(change: dict[str, Any]) -> Damage:
    return text_of("projector_config.json", lambda d: {"0": {"1": {**d["0"]["1"], **change}}})


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("never printed",))


DAMAGES: dict[str, tuple[Damage, type[MoonpoolError], str]] = {
    "missing": (weights_of(lambda s: s.pop("key_in.bias")), BundleCorrupt, r"projector_1.pt.*key_in.bias is missing"),
    "unknown": (weights_of(lambda s: s.update(extra=torch.ones(1))), BundleCorrupt, "extra is unknown"),
    "misshapen": (
        weights_of(lambda s: s.update({"value_in.weight": torch.ones(24, 47)})),
        BundleCorrupt,
        r"value_in.weight is \[24, 47\], not \[24, 48\]",
    ),
    "infinite": (
        weights_of(lambda s: s["key_in.weight"].fill_(torch.inf)), BundleCorrupt, "layers.1.key_in.weight.*NaN or Inf"
    ),
    "pickled code": (
        lambda f: torch.save({"key_in.bias": Evil()}, f / "projector_1.pt"), BundleCorrupt, "something else than weights"
    ),
    "not tensors": (lambda f: torch.save([1, 2], f / "projector_1.pt"), BundleCorrupt, "not a state dict"),
    "no zip": (lambda f: (f / "projector_1.pt").write_bytes(b"\x80\x04."), BundleCorrupt, "not a torch file"),
    "cut off": (
        lambda f: (f / "projector_1.pt").write_bytes((f / "projector_1.pt").read_bytes()[:-9]), BundleCorrupt, r"projector_1.pt"
    ),
    "no file": (lambda f: (f / "projector_1.pt").unlink(), BundleCorrupt, "projector_1.pt: cannot read the weights"),
    "no config": (lambda f: (f / "projector_config.json").unlink(), BundleCorrupt, "not a published checkpoint"),
    "no JSON": (lambda f: (f / "projector_0.json").write_text("{"), BundleCorrupt, "projector_0.json: not JSON"),
    "class": (text_of("projector_1.json", lambda d: {**d, "class": "AblationProjector"}), ConversionRefused, "C2CProjector"),
    "argument": (init(use_swiglu=True), BundleCorrupt, "projector_1.json: .*unknown field `use_swiglu`"),
    "dtype": (init(dtype={"__type__": "torch.device", "value": "cpu"}), BundleCorrupt, "a dtype that is none"),
    "depth": (init(num_layers=2), BundleCorrupt, "num_layers too small"),
    "uneven": (init(hidden_dim=32), BundleCorrupt, "projector_1.json: of another shape"),
    "two sharers": (
        text_of("projector_config.json", lambda d: {"0": {**d["0"], "2": {}}}), BundleCorrupt, "not one pair of models"
    ),
    "two sources": (layers({"1": [[1, 1], [2, 2]]}), BundleCorrupt, r"layer 1;.*\[\[1, 1\], \[2, 2\]\]"),
    "source layer": (layers({"1": [[4, 1]]}), ConversionRefused, "source.num_layers=at least 5"),
    "target layer": (layers({"3": [[3, 1]]}), ConversionRefused, "target.num_layers=at least 4"),
    "words": (text_of("projector_config.json", lambda d: {"0": "1"}), BundleCorrupt, "projector_config.json: Expected"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_what_is_wrong_is_named(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage, error, says = DAMAGES[case]
    publish(tmp_path / "f")
    damage(tmp_path / "f")
    with pytest.raises(error, match=says):
        read_checkpoint(tmp_path / "f", SOURCE, TARGET)
    assert "never printed" not in capsys.readouterr().out


def test_other_models_are_refused_by_every_field(tmp_path: Path) -> None:
    publish(tmp_path / "f")
    with pytest.raises(ConversionRefused, match=r"source.head_dim, target.head_dim, source.num_layers"):
        read_checkpoint(tmp_path / "f", TARGET, SOURCE)


def test_the_command(tmp_path: Path) -> None:
    tiny_model(tmp_path / "sharer", layers=4, dim=16)
    tiny_model(tmp_path / "receiver", layers=3, dim=8, seed=1)
    publish(tmp_path / "f")
    models = ["--source", f"{tmp_path}/sharer", "--target", f"{tmp_path}/receiver"]
    result = CliRunner().invoke(app, ["import", f"{tmp_path}/f", *models, "--out", f"{tmp_path}/bundle"])
    assert result.exit_code == 0, result.output
    bundle = open_bundle(tmp_path / "bundle")
    bundle.check(load_spec(tmp_path / "sharer"), load_spec(tmp_path / "receiver"), 16)
    assert bundle.digest in result.output
    assert "6 of 6 gates open" in result.output
    swapped = ["--source", models[3], "--target", models[1]]
    result = CliRunner().invoke(app, ["import", f"{tmp_path}/f", *swapped, "--out", f"{tmp_path}/other"])
    assert result.exit_code == 2
    assert "sharer as source" in result.output
