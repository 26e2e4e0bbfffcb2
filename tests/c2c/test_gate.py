"""The gate: what a report must show, that it speaks of the very weights, and that damage is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from moonpool.c2c.bundle import WEIGHTS, Bundle, add_files, open_bundle, write_bundle
from moonpool.c2c.config import C2CConfig, C2CFile, Rule, check
from moonpool.c2c.converter import Converter
from moonpool.c2c.fitting.capture import CaptureStore
from moonpool.c2c.fitting.facts import FactWriter
from moonpool.c2c.gate import GateRefused, Thresholds, Verdict, examine, judge
from moonpool.c2c.judging.evaluate import EvalOptions, Evaluator, evaluate
from moonpool.c2c.judging.report import Arm, LengthCheck, Protocol, Report, to_json
from moonpool.c2c.loading import load_conversion
from moonpool.c2c.projectors.identity import IdentityParameters, IdentityProjector
from moonpool.c2c.projectors.linear import LinearParameters, LinearProjector
from moonpool.config import parse
from moonpool.errors import ConfigError
from moonpool.store.embedded import EmbeddedPool
from moonpool.testing.damage import damage
from moonpool.testing.leaks import no_leaks
from moonpool.types import Put
from tests.c2c.pairs import PAGE, config, keys_of, model, random_kv, rule

ROOT = Path(__file__).parents[2]
GOOD: dict[str, Any] = {
    "kl_mean": 0.05,
    "kl_p95": 0.3,
    "top1": 0.94,
    "recovery": 0.97,
    "facts": 0.96,
    "attention_cosine": [0.99, 0.95, 0.97],
}


def arm(name: str, **changes: Any) -> Arm:
    return Arm(**{"name": name, "nll": 2.0, **GOOD, **changes})


def report(wrong: float | None = 0.05, native: float | None = 0.98, r2: float = 0.9, **changes: Any) -> Report:
    protocol = Protocol(prefix_tokens=64, continuation_tokens=15, page_size=16, documents=4, fact_chance=0.1)
    arms = [arm("native", facts=native), arm("mapped", **changes), arm("wrong_document", facts=wrong)]
    sides: dict[str, Any] = {
        "source": "a",
        "source_revision": "1",
        "target": "b",
        "target_revision": "2",
        "projector": "linear",
    }
    return Report(**sides, protocol=protocol, arms=arms, r2_k=[r2] * 3, r2_v=[r2] * 3)


def test_a_good_report_passes_whatever_its_r2() -> None:
    assert judge(report(r2=-1.0), Thresholds()) == Verdict(True, [], 0.05)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kl_mean": 0.3}, "kl_mean: needed <= 0.25, is 0.3"),
        ({"kl_mean": float("nan")}, "kl_mean: needed <= 0.25, is nan"),
        ({"kl_p95": 1.5}, "kl_p95: needed <= 1, is 1.5"),
        ({"top1": 0.854}, "top1: needed >= 0.9, is 0.854"),
        ({"attention_cosine": [0.99, 0.85, 0.97]}, "attention_cosine of layer 1: needed >= 0.9, is 0.85"),
        ({"recovery": 0.608}, "recovery: needed >= 0.9, is 0.608"),
        ({"facts": 0.5}, "facts as a share of native: needed >= 0.95, is 0.51"),
        ({"wrong": 0.4}, "wrong_facts over another document's cache (chance 0.1): needed <= 0.15, is 0.4"),
    ],
)
def test_a_failure_names_measure_need_and_have(changes: dict[str, Any], says: str) -> None:
    assert judge(report(**changes), Thresholds()).failures == [says]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_cosine": []}, "attention_cosine: needed, and not in the report: `moonpool c2c eval"),
        ({"recovery": None}, "recovery: needed, and these texts are worth too little"),
        (
            {"facts": None},
            "facts as a share of native: needed, and no questions were asked: `moonpool c2c eval --facts",
        ),
        ({"wrong": None}, "wrong_facts over another document's cache"),
        (
            {"native": 0.12},
            "facts as a share of native: needed, and the native model itself answers no more than chance",
        ),
    ],
)
def test_a_measure_that_is_demanded_and_missing_is_a_failure(changes: dict[str, Any], says: str) -> None:
    (failure,) = judge(report(**changes), Thresholds()).failures
    assert failure.startswith(says)
    assert judge(report(**changes), Thresholds(demand=())).passed, "what is not demanded may be missing"


def test_what_is_not_demanded_is_judged_where_it_is_there() -> None:
    assert judge(report(top1=0.5), Thresholds(demand=())).failures == ["top1: needed >= 0.9, is 0.5"]


def test_a_measure_that_only_some_reports_have_can_be_demanded() -> None:
    said = judge(report(), Thresholds(demand=("generation", "long"))).failures
    assert [s.partition(":")[0] for s in said] == ["generation", "long"]


def test_generation_counts_only_where_it_is_demanded() -> None:
    low = replace(report(), generation_retention=0.2)
    assert judge(low, Thresholds()).passed
    (failure,) = judge(low, Thresholds(demand=("generation",))).failures
    assert failure == "generation: needed >= 0.5, is 0.2"


def test_the_check_at_a_multiple_of_the_length_is_judged_where_it_is_there() -> None:
    def long(**changes: Any) -> Report:
        return replace(
            report(), long=LengthCheck(**{"tokens": 256, "documents": 2, "kl_mean": 0.1, "top1": 0.92, **changes})
        )

    assert judge(long(), Thresholds()).passed
    assert judge(long(recovery=0.95), Thresholds()).passed
    said = judge(long(kl_mean=0.3, top1=0.7, recovery=0.5), Thresholds()).failures
    assert said == [
        "long kl_mean: needed <= 0.275, is 0.3",
        "long top1: needed >= 0.81, is 0.7",
        "long recovery: needed >= 0.81, is 0.5",
    ]


@pytest.mark.parametrize(
    ("gate", "says"),
    [
        ("gate: {top1: 2}", "gate.top1 out of range; needed 0..1; there is 2"),
        ("gate: {recovery: -0.1}", "gate.recovery out of range"),
        ("gate: {kl_mean: 0}", "gate.kl_mean out of range"),
        ("gate: {kl: 0.2}", "kl"),
        ("gate: {demand: [r2]}", "r2"),
        ("shadow: 1.5", "shadow out of range; needed 0..1; there is 1.5"),
        ("shadow: 0.1, mode: fuse", "no gate"),
        ("force: perhaps", "bool"),
    ],
)
def test_mistakes_in_a_rules_gate_are_named(gate: str, says: str) -> None:
    text = "models: {a: {ref: a}, b: {ref: b}}\nrules: [{source: a, target: b, bundle: x, GATE}]\n"
    text = text.replace("GATE", gate)
    with pytest.raises(ConfigError, match=says):
        check(parse(text.encode(), C2CFile, name="c2c.yaml"), name="c2c.yaml")


# -- bundles

SOURCE, TARGET = model("source"), model("target")
SHAPE = SOURCE.spec.page_shape(PAGE)


def bundle(folder: Path, found: Report | None) -> Bundle:
    projector = IdentityProjector(IdentityParameters(layers=SHAPE.layers, width=SHAPE.width))
    made = write_bundle(folder, projector, SOURCE.spec, TARGET.spec)
    if found is None:
        return made
    return add_files(made, {"report.json": to_json(replace(found, weights=made.sums[WEIGHTS]))})


def rule_for(made: Bundle, **changes: Any) -> Rule:
    return replace(rule(SOURCE, TARGET, bundle=str(made.folder), digest=made.digest), **changes)


def load(made: Bundle, **changes: Any) -> Verdict | None:
    one = rule_for(made, **changes)
    return load_conversion(one, config(one)).verdict


def test_without_a_report_a_bundle_is_refused_and_told_how_to_get_one(tmp_path: Path) -> None:
    made = bundle(tmp_path / "b", None)
    with pytest.raises(GateRefused, match=r"report: there is none.*moonpool c2c eval --into-bundle.*force: true"):
        load(made)
    forced = load(made, force=True)
    assert forced is not None
    assert not forced.passed


def test_a_report_decides_by_the_rules_own_thresholds(tmp_path: Path) -> None:
    made = bundle(tmp_path / "b", report(top1=0.8))
    with pytest.raises(GateRefused, match=r"top1: needed >= 0\.9, is 0\.8"):
        load(made)
    assert load(made, gate=Thresholds(top1=0.75)) == Verdict(True, [], 0.05)


def test_a_report_that_is_damaged_or_speaks_of_nothing_is_as_none(tmp_path: Path) -> None:
    made = bundle(tmp_path / "b", None)
    silent = add_files(made, {"report.json": to_json(report())})
    assert examine(silent, Thresholds()).failures == ["report: it does not say of which weights it speaks"]
    broken = add_files(made, {"report.json": b"{}"})
    assert not examine(broken, Thresholds()).passed


def running(conf: C2CConfig) -> tuple[list[str], list[str], int, dict[str, int]]:
    """States and verdicts of the rules, pages made and pages refused after three pages were put."""
    with no_leaks(), EmbeddedPool(4 << 20) as pool:
        converter = Converter(pool, conf).start()
        try:
            rules = converter.wait_ready(10)
            keys = [k.text for k in keys_of(SOURCE, 3 * PAGE)]
            assert pool.batch_put(keys, random_kv(SHAPE, 3)) == [Put.STORED] * 3
            found = converter.stats()
            while found.converted_pages + sum(found.rejected.values()) < 3:
                converter.wait_idle(0.05)
                found = converter.stats()
            told = {r.digest: r for r in pool.master.rules().rules}
            assert all(told[r.digest].gate == r.gate for r in rules), "the master knows"
            return [r.state for r in rules], [r.gate for r in rules], found.converted_pages, found.rejected
        finally:
            converter.close()


@pytest.mark.parametrize(
    ("top1", "force", "states"),
    [
        (0.94, False, (["ready"], ["passed"], 2)),
        (0.80, False, (["refused"], ["refused"], 0)),
        (0.80, True, (["ready"], ["forced"], 2)),
        (0.94, True, (["ready"], ["passed"], 2)),
    ],
)
def test_the_converter_serves_what_passed_or_was_forced(
    tmp_path: Path, top1: float, force: bool, states: tuple[list[str], list[str], int]
) -> None:
    made = bundle(tmp_path / "b", report(top1=top1))
    *found, rejected = running(config(rule_for(made, force=force)))
    assert tuple(found) == states
    assert rejected == ({"first_page": 1} if states[2] else {"rule_refused": 3})


# -- damage


def linear(folder: Path) -> Bundle:
    """A linear bundle of all ones, with a good report."""
    import torch

    width, layers = SHAPE.width, SHAPE.layers
    parameters = LinearParameters(
        source_layers=layers,
        source_width=width,
        target_layers=layers,
        target_width=width,
        sources=[[[t], [t]] for t in range(layers)],
    )
    weights = [[torch.ones(2 * width, width)] * 2 for _ in range(layers)]
    made = write_bundle(
        folder, LinearProjector(parameters, weights, torch.zeros(layers, 2, width)), SOURCE.spec, TARGET.spec
    )
    return add_files(made, {"report.json": to_json(replace(report(), weights=made.sums[WEIGHTS]))})


def test_damage_hits_one_layer_and_its_old_report_is_refused_at_once(tmp_path: Path) -> None:
    sound = linear(tmp_path / "sound")
    assert examine(sound, Thresholds()).passed
    harmed = damage(sound, tmp_path / "harmed", 1, 0.1, keep_report=True)
    with pytest.raises(GateRefused, match="it speaks of other weights"):
        load(harmed)
    before, after = ({n: t.float() for n, t in b.stored().tensors().items()} for b in (sound, harmed))
    gone = {n: float((after[n] == 0).float().mean()) for n in before if n.endswith("weight")}
    assert {n.split(".")[1] for n, share in gone.items() if share} == {"1"}
    assert all(0.05 < share < 0.15 for share in gone.values() if share)
    with pytest.raises(ValueError, match="no weights of layer 9"):
        damage(sound, tmp_path / "nothing", 9, 0.1)


def test_the_evaluator_finds_the_damage_and_the_gate_refuses_it(tmp_path: Path) -> None:
    """The bundled pair, 10 % of one layer's weights zeroed. Few documents say little of the mean, so only what they do say is
    asked for; the layer's attention output is far off even here."""
    pair = [CaptureStore(tmp_path / "kv", ROOT / "models" / name) for name in ("moon-large", "moon-small")]
    options = EvalOptions(prefix=64, continuation=23)
    writer = FactWriter(pair[1].model.tokenizer, seed=3)
    texts = [writer.document(options.document_tokens, facts=5, margin=16).tokens for _ in range(2)]
    gate = Thresholds(kl_mean=0.3, top1=0.7, demand=("kl_mean", "kl_p95", "top1", "attention_cosine"), recovery=0.0)

    def judged(one: Bundle) -> Verdict:
        found = evaluate(Evaluator(pair[0], pair[1], one.projector(), options), texts, [], Console(quiet=True))
        return judge(found, gate)

    sound = open_bundle(ROOT / "bundles" / "moon-large-to-moon-small")
    assert judged(sound).failures == []
    (failure,) = judged(damage(sound, tmp_path / "harmed", 3, 0.1)).failures
    assert failure.startswith("attention_cosine of layer 3: needed >= 0.9, is ")
