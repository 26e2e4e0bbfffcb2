"""Calibrations are kept per pair and machine, never believed when wrong, and decide what the converter makes."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from moonpool.c2c.bundle import open_bundle
from moonpool.c2c.calibration import (
    Calibration,
    RuleCosts,
    find_calibration,
    rule_cost,
    save_calibration,
)
from moonpool.c2c.commands import app
from moonpool.c2c.config import C2CConfig, Model, Rule, load_c2c
from moonpool.c2c.converter import Converter
from moonpool.c2c.cost import DEFAULT_VARIANT, conversion_flops
from moonpool.c2c.signature import load_shape, load_spec
from moonpool.errors import ConfigError
from moonpool.store.embedded import EmbeddedPool
from moonpool.testing.leaks import eventually, no_leaks
from tests.c2c.pairs import BUNDLE, PAGE, config, identity_of, keys_of, random_kv, rule, spec
from tests.c2c.test_cost import config as config_json
from tests.c2c.tiny import tiny_model

BUNDLED = str(Path(__file__).parents[2] / "bundles" / "moon-large-to-moon-small")


def model(name: str) -> Model:
    known = msgspec.structs.replace(spec(name), intermediate=64)
    return Model(name, name, known, known.identity(PAGE).digest())


SOURCE, TARGET, OTHER = model("source"), model("target"), model("other")
PAIR = SOURCE.spec, TARGET.spec
RULE = rule(SOURCE, TARGET)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_CACHE", str(tmp_path / "cache"))


def measured(**changes: object) -> Calibration:
    found = Calibration(
        source="source", target="target", device="cpu", threads=1, prefill=1e9, gemm=2e9,
        fetch={"memory": 1e9, "network": 1e6}, overhead_s=1e-3, convert_s={BUNDLE: 5e-6},
    )  # fmt: skip
    return msgspec.structs.replace(found, **changes)


def test_it_is_kept_for_these_weights_only() -> None:
    assert find_calibration(*PAIR) is None
    save_calibration(measured(), *PAIR)
    assert find_calibration(*PAIR) == measured()
    assert find_calibration(TARGET.spec, SOURCE.spec) is None
    assert find_calibration(SOURCE.spec, msgspec.structs.replace(TARGET.spec, revision="other")) is None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"[]",
        msgspec.json.encode(measured(format=9)),
        msgspec.json.encode(measured(prefill=0.0)),
        msgspec.json.encode(measured(tier="disk")),
    ],
)
def test_a_damaged_one_is_none(raw: bytes) -> None:
    path = save_calibration(measured(), *PAIR)
    path.write_bytes(raw)
    assert find_calibration(*PAIR) is None


def test_a_rules_cost_is_of_its_bundle_device_and_tier() -> None:
    assert rule_cost(RULE) is None, "not calibrated"
    save_calibration(measured(), *PAIR)
    found = rule_cost(RULE)
    assert found is not None
    assert found.convert_s == 5e-6
    assert rule_cost(RULE, device="cuda") is None
    assert rule_cost(msgspec.structs.replace(RULE, pays="always")) is None
    other = rule_cost(msgspec.structs.replace(RULE, digest="c" * 32))
    assert other is not None
    assert other.convert_s == (conversion_flops(DEFAULT_VARIANT, *PAIR) or 0) / 2e9, "not measured: the default variant"
    save_calibration(measured(tier="network"), *PAIR)
    slow = rule_cost(RULE)
    assert slow is not None
    assert slow.fetch_target_s == pytest.approx(1000 * found.fetch_target_s)


def run(rules: list[Rule], hint: bool = False) -> tuple[int, dict[str, int]]:
    """Put three source pages; (pages converted, why others were not)."""
    keys, pages = keys_of(SOURCE, 3 * PAGE), random_kv(SOURCE.spec.page_shape(PAGE), 3)
    with EmbeddedPool(8 << 20) as pool:
        converter = Converter(pool, config(*rules), load=lambda rule, _: identity_of(rule)).start()
        try:
            converter.wait_ready(10)
            pool.batch_put([k.text for k in keys], pages)
            if hint:
                pool.hint(keys_of(TARGET, 3 * PAGE))
            want = 6 if hint else 3

            def done() -> bool:
                stats = converter.stats()
                return stats.converted_pages + sum(stats.rejected.values()) >= want and converter.wait_idle(0)

            assert eventually(done)
            return converter.stats().converted_pages, converter.stats().rejected
        finally:
            converter.close()


def test_the_converter_makes_no_page_that_cannot_pay() -> None:
    with no_leaks():
        assert run([RULE])[0] == 2, "without a calibration all but the first page"
        save_calibration(measured(), *PAIR)
        assert run([RULE])[0] == 2
        save_calibration(measured(convert_s={BUNDLE: 1.0}), *PAIR)
        assert run([RULE]) == (0, {"convert_slower_than_prefill": 3})
        assert run([msgspec.structs.replace(RULE, pays="always")])[0] == 2
        assert run([RULE], hint=True)[0] == 2, "who hints knows more than the model"


def test_a_page_that_is_read_slower_than_computed_is_not_made() -> None:
    save_calibration(measured(tier="network"), *PAIR)
    assert RuleCosts.of([RULE], PAGE).refusal(0, 1) == "fetch_slower_than_prefill"


def test_an_on_load_rule_is_not_the_converters_work() -> None:
    converted, rejected = 0, dict[str, int]()
    keys = keys_of(SOURCE, 3 * PAGE)
    with EmbeddedPool(8 << 20) as pool:
        rules = [rule(SOURCE, TARGET, mode="on_load"), rule(SOURCE, OTHER, digest="d" * 32)]
        converter = Converter(pool, config(*rules), load=lambda rule, _: identity_of(rule)).start()
        try:
            converter.wait_ready(10)
            pool.lookup(keys_of(TARGET, 3 * PAGE), [BUNDLE])
            pool.hint(keys_of(TARGET, 3 * PAGE))
            pool.batch_put([k.text for k in keys], random_kv(SOURCE.spec.page_shape(PAGE), 3))
            assert eventually(lambda: converter.stats().converted_pages >= 2), "the second rule has seen its events"
            converted, rejected = converter.stats().converted_pages, converter.stats().rejected
        finally:
            converter.close()
    assert (converted, rejected) == (2, {"first_page": 1}), "the second rule's pages alone"


def test_costs_are_by_rule_number() -> None:
    save_calibration(measured(convert_s={BUNDLE: 1.0}), *PAIR)
    back = rule(TARGET, SOURCE)
    costs = RuleCosts.of([back, RULE], PAGE)
    assert costs.refusal(0, 1) == ""
    assert costs.refusal(1, 1) == "convert_slower_than_prefill"


def test_a_file_says_when_it_pays_and_what_is_stored(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    text = (
        "models: {a: {ref: moon-large}, b: {ref: moon-small}}\n"
        "rules: [{source: a, target: b, bundle: moon-large-to-moon-small, mode: on_load%s}]\n"
    )
    (tmp_path / "c2c.yaml").write_text(text % ", pays: always, store_loaded: true")
    for name in ("moon-large", "moon-small"):
        (tmp_path / name).symlink_to(root / "models" / name)
    (tmp_path / "moon-large-to-moon-small").symlink_to(root / "bundles" / "moon-large-to-moon-small")
    found = load_c2c(tmp_path / "c2c.yaml")
    assert [(r.mode, r.pays, r.store_loaded) for r in C2CConfig.decode(found.encode()).rules] == [
        ("on_load", "always", True)
    ]
    (tmp_path / "c2c.yaml").write_text(text % "")
    assert [(r.pays, r.store_loaded) for r in load_c2c(tmp_path / "c2c.yaml").rules] == [("auto", False)]
    (tmp_path / "c2c.yaml").write_text(text % ", pays: never")
    with pytest.raises(ConfigError, match="pays"):
        load_c2c(tmp_path / "c2c.yaml")


# -- commands


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_calibrate_measures_and_advise_uses_it() -> None:
    root = Path(__file__).parents[2]
    large, small, bundle = str(root / "models/moon-large"), str(root / "models/moon-small"), BUNDLED
    pair = "--source", large, "--target", small
    refused = CliRunner().invoke(app, ["advise", *pair, "--hardware", "this"])
    assert refused.exit_code == 2
    assert "moonpool c2c calibrate" in refused.output
    for wrong, says in (
        (["--device", "abacus"], "no such device"),
        (["--tier", "tape"], "tier"),
        (["--network", "x"], "network"),
    ):
        result = CliRunner().invoke(app, ["calibrate", *pair, *wrong])
        assert result.exit_code == 2
        assert says in result.output
    shown = invoke("calibrate", *pair, "--bundle", bundle, "--network", "2.5", "--min-tokens", "7", "--json")
    found = msgspec.json.decode(shown, type=Calibration)
    assert found == find_calibration(load_spec(large), load_spec(small))
    assert found.fetch["network"] == 2.5e9
    assert found.min_tokens == 7
    assert min(found.prefill, found.gemm, found.fetch["memory"], found.fetch["disk"]) > 1e6
    assert 1e-7 < found.convert_s[open_bundle(Path(bundle)).digest] < 1e-2
    advice = json.loads(invoke("advise", *pair, "--hardware", "this", "--bundle", bundle, "--json"))
    (time,) = advice["times"]
    assert (time["hardware"], time["network"], time["variant"]) == ("this", "memory", "bundle")
    assert time["convert_us"] == pytest.approx(next(iter(found.convert_s.values())) * 1e6)


def test_advise_prints_the_design_table_from_two_configs(tmp_path: Path) -> None:
    for name in ("Qwen3-4B", "Qwen3-0.6B"):
        (tmp_path / f"{name}.json").write_text(json.dumps(config_json(name)))
    pair = "--source", f"{tmp_path}/Qwen3-4B.json", "--target", f"{tmp_path}/Qwen3-0.6B.json"
    shown = invoke("advise", *pair, "--hardware", "big-gpu", "--network", "100gbe", "--network", "400g")
    rows = {tuple(line.split()[:2]): line.split() for line in shown.splitlines() if line.strip()}
    assert rows["HL-4", "0.059"][3:] == ["5.9%", "4.3%", "1.3%"]
    assert rows["C2C-shape", "0.940"] == ["C2C-shape", "0.940", "897", "94%", "70%", "20%"]
    times = [line.split() for line in shown.splitlines() if line.split()[:1] == ["big-gpu"]]
    assert times[0] == ["big-gpu", "100gbe", "HL-4", "3.38", "0.15", "13.4", "10.4", "0.32", "0.25", "-", "no"]
    assert times[2][-4:] == ["no", "(32", "K:", "yes)"]


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (["--hardware", "abacus"], "unknown `abacus`"),
        (["--network", "pigeon"], "unknown `pigeon`"),
        (["--bundle", "none"], "no bundle here"),
        (["--bundle", BUNDLED], "for another source"),
    ],
)
def test_advise_names_mistakes(tmp_path: Path, own: list[str], says: str) -> None:
    (tmp_path / "m.json").write_text(json.dumps(config_json("Qwen3-4B")))
    result = CliRunner().invoke(
        app, ["advise", "--source", f"{tmp_path}/m.json", "--target", f"{tmp_path}/m.json", *own]
    )
    assert result.exit_code == 2
    assert says in result.output


def test_two_tokenizers_are_noted(tmp_path: Path) -> None:
    a, b = tiny_model(tmp_path / "a"), tiny_model(tmp_path / "b")
    tokenizer = json.loads((b / "tokenizer.json").read_text())
    (b / "tokenizer.json").write_text(json.dumps({**tokenizer, "normalizer": {"type": "NFKC"}}))
    assert load_shape(a).tokenizer != load_shape(b).tokenizer
    assert "tokenizers differ" in invoke("advise", "--source", str(a), "--target", str(b), "--hardware", "cpu")
    assert "tokenizers differ" not in invoke("advise", "--source", str(a), "--target", str(a), "--hardware", "cpu")
