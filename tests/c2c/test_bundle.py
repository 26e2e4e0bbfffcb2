"""Bundles: whole or not there, bound to their models, and free of surprises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from moonpool.c2c.bundle import (
    Bundle,
    _write_sums,
    add_files,
    folder_digest,
    open_bundle,
    read_sums,
    sums_digest,
    write_bundle,
)
from moonpool.c2c.projectors.linear import LinearParameters, LinearProjector
from moonpool.c2c.signature import ModelSpec, RopeSpec
from moonpool.errors import BundleCorrupt, BundleError, ConversionRefused, DigestMismatch
from tests.c2c.support import spec

SOURCE, TARGET = spec("big", layers=3), spec("small", layers=2, revision="r2")


def projector(fill: float | None = None) -> LinearProjector:
    parameters = LinearParameters(
        source_layers=3, source_width=16, target_layers=2, target_width=16, sources=[[[0], [1]], [[1, 2], [2]]]
    )
    make = torch.Generator().manual_seed(0)
    weights = [[torch.randn(len(s) * 32, 16, generator=make) for s in pair] for pair in parameters.sources]
    if fill is not None:
        weights[0][0][3, 3] = fill
    return LinearProjector(parameters, weights, torch.randn(2, 2, 16, generator=make))


def bundle(folder: Path, **options: Any) -> Bundle:
    return write_bundle(folder / "b", projector(), SOURCE, TARGET, **options)


def test_written_and_opened_again(tmp_path: Path) -> None:
    made = bundle(tmp_path, dtype=torch.float32, training_data=["doc"], created_by="test", page_sizes=[16])
    again = open_bundle(tmp_path / "b", expect_digest=made.digest)
    assert again == made
    assert made.digest == folder_digest(tmp_path / "b") == sums_digest((tmp_path / "b" / "SHA256SUMS").read_bytes())
    assert (again.manifest.source.name, again.manifest.training_data, again.manifest.kind) == ("big", ["doc"], "linear")
    x = torch.randn(4, 3, 2, 16)
    assert torch.equal(again.projector().project(x), projector().project(x))
    assert sorted(f.name for f in (tmp_path / "b").iterdir()) == ["SHA256SUMS", "manifest.json", "weights.safetensors"]


def test_weights_are_halved_and_biases_are_not(tmp_path: Path) -> None:
    stored = load_file(bundle(tmp_path).folder / "weights.safetensors")
    assert stored["layers.0.k.weight"].dtype == torch.bfloat16
    assert torch.equal(stored["bias"], projector().tensors()["bias"])


def test_the_same_projector_gives_the_same_digest(tmp_path: Path) -> None:
    assert bundle(tmp_path).digest == bundle(tmp_path / "other").digest


def test_replaced_by_a_whole_one_only(tmp_path: Path) -> None:
    before = bundle(tmp_path)
    with pytest.raises(BundleCorrupt, match="NaN"):
        write_bundle(tmp_path / "b", projector(torch.nan), SOURCE, TARGET)
    with pytest.raises(BundleCorrupt, match="Inf"):  # finite in fp32, not in bf16
        write_bundle(tmp_path / "b", projector(3.4028e38), SOURCE, TARGET)
    assert open_bundle(tmp_path / "b").digest == before.digest
    assert write_bundle(tmp_path / "b", projector(1.0), SOURCE, TARGET).digest != before.digest
    assert [f.name for f in tmp_path.iterdir()] == ["b"], "no temporary folder is left"


def test_a_folder_that_is_no_bundle_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("years of work")
    with pytest.raises(BundleError, match="something else"):
        bundle(tmp_path)
    assert (tmp_path / "b" / "thesis.txt").read_text() == "years of work"


def test_a_report_is_bound_by_the_digest(tmp_path: Path) -> None:
    before = bundle(tmp_path)
    after = add_files(before, {"report.json": b"{}"})
    assert after.digest != before.digest
    assert after.read("report.json") == b"{}"
    with pytest.raises(DigestMismatch, match="another bundle"):
        open_bundle(after.folder, expect_digest=before.digest)
    (after.folder / "report.json").write_bytes(b'{"good": true}')
    with pytest.raises(DigestMismatch, match=r"report\.json"):
        open_bundle(after.folder)


@pytest.mark.parametrize("name", ["weights.safetensors", "manifest.json", "../x", "x.pt"])
def test_only_reports_can_be_added(tmp_path: Path, name: str) -> None:
    with pytest.raises(BundleError, match="not a file that can be added"):
        add_files(bundle(tmp_path), {name: b""})


def test_a_report_that_nobody_summed_is_refused(tmp_path: Path) -> None:
    made = bundle(tmp_path)
    (made.folder / "report.json").write_bytes(b"{}")
    with pytest.raises(BundleCorrupt, match=r"report\.json"):
        open_bundle(made.folder)
    with pytest.raises(BundleCorrupt, match="no such file"):
        made.read("report.json")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "swapped"])
@pytest.mark.parametrize("name", ["weights.safetensors", "manifest.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    made = bundle(tmp_path)
    path = made.folder / name
    raw = path.read_bytes()
    other = write_bundle(tmp_path / "other", projector(1.0), SOURCE, spec("another", layers=2)).folder / name
    changed = {
        "truncated": raw[:-7],
        "flipped": raw[:-1] + bytes([raw[-1] ^ 1]),
        "swapped": other.read_bytes(),
    }
    path.unlink()
    if damage in changed:
        path.write_bytes(changed[damage])
    with pytest.raises(BundleError, match=name.split(".")[0]):
        open_bundle(made.folder)


def test_weights_swapped_after_opening_are_not_used(tmp_path: Path) -> None:
    made = bundle(tmp_path)
    other = write_bundle(tmp_path / "other", projector(1.0), SOURCE, TARGET)
    (other.folder / "weights.safetensors").replace(made.folder / "weights.safetensors")
    with pytest.raises(DigestMismatch, match="weights"):
        made.projector()


def resummed(made: Bundle) -> Bundle:
    _write_sums(made.folder)
    return open_bundle(made.folder)


def test_o7_bad_weights_with_right_sums_are_refused_at_load(tmp_path: Path) -> None:
    made = bundle(tmp_path)
    path = made.folder / "weights.safetensors"
    good = load_file(path)
    name = "layers.1.k.weight"
    for says, tensors in (
        ("missing", {k: v for k, v in good.items() if k != name}),
        ("wrong shape", {**good, name: good[name].T.contiguous()}),
        ("NaN", {**good, name: torch.full_like(good[name], torch.nan)}),
        ("does not have", {**good, "exec": torch.zeros(1)}),
    ):
        save_file(tensors, path)
        with pytest.raises(BundleCorrupt, match=says):
            resummed(made).projector()


def test_o7_a_pickle_is_refused_under_any_name(tmp_path: Path) -> None:
    made = bundle(tmp_path)
    torch.save({"w": torch.zeros(2)}, made.folder / "weights.safetensors")
    with pytest.raises(BundleCorrupt, match="unreadable weights"):
        resummed(made).projector()
    torch.save({"w": torch.zeros(2)}, made.folder / "weights.pt")
    with pytest.raises(BundleCorrupt, match=r"weights\.pt"):
        open_bundle(made.folder)


@pytest.mark.parametrize(
    "line",
    [
        f"{'0' * 64}  ../weights.safetensors",
        f"{'0' * 64}  /etc/passwd",
        f"{'0' * 64}  weights.pt",
        f"{'0' * 63}  weights.safetensors",
        "hello",
    ],
)
def test_sums_hold_known_names_only(line: str) -> None:
    with pytest.raises(BundleCorrupt, match="bad line"):
        read_sums(line.encode(), "here")


def test_sums_must_be_whole_and_say_each_name_once() -> None:
    line = f"{'0' * 64}  manifest.json\n"
    with pytest.raises(BundleCorrupt, match="incomplete"):
        read_sums(line.encode(), "here")
    with pytest.raises(BundleCorrupt, match="bad line"):
        read_sums((line * 2).encode(), "here")


def test_no_bundle_and_too_large_ones_say_so(tmp_path: Path) -> None:
    with pytest.raises(BundleCorrupt, match="no bundle here"):
        open_bundle(tmp_path / "nothing")
    (tmp_path / "SHA256SUMS").write_bytes(b"x" * (17 << 20))
    with pytest.raises(BundleCorrupt, match="too large"):
        open_bundle(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2, "new_field": 1}, "another format"),
        ({"surprise": 1}, "surprise"),
        ({"kind": "fusion"}, "unknown projector kind"),
        ({"parameters": {}}, "source_layers"),
    ],
)
def test_manifests_are_typed(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    made = bundle(tmp_path)
    path = made.folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(BundleCorrupt, match=says):
        resummed(made).projector()


def changed(of: ModelSpec, **fields: Any) -> ModelSpec:
    return msgspec.structs.replace(of, **fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("revision", "other"),
        ("model_type", "llama"),
        ("num_layers", 9),
        ("num_kv_heads", 9),
        ("head_dim", 9),
        ("qk_norm", True),
        ("rope.theta", RopeSpec(theta=5e5, rotary_dim=8)),
        ("rope.factor", RopeSpec(theta=1e4, rotary_dim=8, factor=2.0)),
    ],
)
@pytest.mark.parametrize("role", ["source", "target"])
def test_o2_every_mismatch_is_refused_by_name(tmp_path: Path, role: str, field: str, value: Any) -> None:
    pair = {"source": SOURCE, "target": TARGET}
    pair[role] = changed(pair[role], **{field.split(".")[0]: value})
    with pytest.raises(ConversionRefused, match=f"{role}.{field}") as e:
        bundle(tmp_path).check(pair["source"], pair["target"], 16)
    assert e.value.need
    assert e.value.have


def test_o2_tokenizer_dtype_layout_and_page_size(tmp_path: Path) -> None:
    made = bundle(tmp_path, page_sizes=[16, 32])
    made.check(SOURCE, TARGET, 16)
    with pytest.raises(ConversionRefused, match="tokenizer"):
        made.check(SOURCE, changed(TARGET, tokenizer="t2"), 16)
    both = [changed(s, tokenizer="t2") for s in (SOURCE, TARGET)]
    with pytest.raises(ConversionRefused, match=r"source\.tokenizer, target\.tokenizer"):
        made.check(both[0], both[1], 16)
    with pytest.raises(ConversionRefused, match=r"page_size.*\[16, 32\].*64"):
        made.check(SOURCE, TARGET, 64)
    with pytest.raises(ConversionRefused, match=r"kv_dtype=bfloat16.*kv_dtype=float8"):
        made.check(SOURCE, TARGET, 16, kv_dtype="float8")
    other = msgspec.structs.replace(made, manifest=msgspec.structs.replace(made.manifest, layout="other"))
    with pytest.raises(ConversionRefused, match="layout"):
        other.check(SOURCE, TARGET, 16)


def test_all_differences_are_named_at_once_and_a_name_alone_is_none(tmp_path: Path) -> None:
    made = bundle(tmp_path)
    made.check(changed(SOURCE, name="a-copy", max_positions=9), TARGET, 7)
    with pytest.raises(ConversionRefused, match=r"source\.revision.*target\.rope\.theta"):
        made.check(changed(SOURCE, revision="x"), changed(TARGET, rope=RopeSpec(5e5, rotary_dim=8)), 16)
