"""The evaluator: a perfect projector looks perfect, a broken one broken, and the controls are worse than native."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from moonpool.c2c.fitting.capture import KV, CaptureStore
from moonpool.c2c.fitting.facts import FactWriter
from moonpool.c2c.judging.arms import Case, Mapper, arms, noise
from moonpool.c2c.judging.evaluate import EvalOptions, Evaluator, evaluate
from moonpool.c2c.judging.report import Report, from_json, markdown, read_report, recovery, table, to_json
from moonpool.c2c.projectors.base import Projector
from moonpool.c2c.projectors.identity import IdentityParameters, IdentityProjector
from moonpool.c2c.projectors.linear import LinearParameters, LinearProjector
from moonpool.errors import BundleCorrupt, ConfigError
from tests.c2c.tiny import documents, tiny_model, tokenizer

QUIET = Console(quiet=True)
OPTIONS = EvalOptions(prefix=64, continuation=15, page_size=8)
LAYERS, HEADS, DIM = 3, 2, 16


def identity() -> Projector:
    return IdentityProjector(IdentityParameters(layers=LAYERS, width=HEADS * DIM))


def swapped_heads() -> Projector:
    """Every number of the cache is right but stands in the other head's place (field-bugs O4)."""
    width = HEADS * DIM
    swap = torch.eye(width).roll(DIM, 0)
    halves = [torch.cat([swap, torch.zeros(width, width)]), torch.cat([torch.zeros(width, width), swap])]
    parameters = LinearParameters(
        source_layers=LAYERS,
        source_width=width,
        target_layers=LAYERS,
        target_width=width,
        sources=[[[t], [t]] for t in range(LAYERS)],
    )
    return LinearProjector(parameters, [halves] * LAYERS, torch.zeros(LAYERS, 2, width))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CaptureStore:
    root = tmp_path_factory.mktemp("eval")
    return CaptureStore(root / "kept", tiny_model(root / "model", layers=LAYERS, dim=DIM))


@pytest.fixture(scope="module")
def report(store: CaptureStore) -> Report:
    writer = FactWriter(tokenizer())
    asked = [writer.document(64, facts=3, questions=4, margin=8)]
    evaluator = Evaluator(store, store, identity(), OPTIONS, compare=swapped_heads())
    return evaluate(evaluator, documents(3, OPTIONS.document_tokens), asked, QUIET)


def test_the_same_model_is_native(report: Report) -> None:
    native, mapped = report.arm("native"), report.arm("mapped")
    assert mapped.nll == pytest.approx(native.nll, abs=1e-5)
    assert mapped.kl_mean == pytest.approx(0, abs=1e-6)
    assert mapped.top1 == 1
    assert min(mapped.attention_cosine) > 0.9999
    assert min(report.r2_k + report.r2_v) > 0.9999


def test_permuted_heads_are_exposed(report: Report) -> None:
    assert report.arm("compare").kl_mean > 0.01
    assert min(report.arm("compare").attention_cosine) < 0.9


@pytest.mark.parametrize(
    "arm", ["first_page", "wrong_document", "wrong_mapped", "zeros", "noise", "no_context", "shuffled_keys"]
)
def test_controls_differ_from_native(report: Report, arm: str) -> None:
    assert report.arm(arm).kl_mean > 0.01
    assert report.arm(arm).kl_p95 > report.arm(arm).kl_mean


def test_facts_are_asked_and_chance_is_told(report: Report) -> None:
    assert report.protocol.fact_questions == 4
    assert report.protocol.fact_chance == pytest.approx(1 / 3)
    assert report.arm("mapped").facts == report.arm("native").facts
    assert report.arm("no_context").answer_nll is not None


def test_recovery_is_silent_where_the_context_is_worth_nothing() -> None:
    assert recovery(native=1.0, none=3.0, arm=2.0) == 0.5
    assert recovery(native=1.0, none=1.01, arm=2.0) is None


def test_round_trip(report: Report, tmp_path: Path) -> None:
    assert from_json(to_json(report)) == report
    (tmp_path / "report.json").write_bytes(to_json(report))
    assert read_report(tmp_path / "report.json") == report
    text = markdown(report)
    assert all(arm.name in text for arm in report.arms)
    assert table(report).row_count == len(report.arms)


@pytest.mark.parametrize("raw", [b"", b"{}", b"[1]"])
def test_what_is_no_report_is_refused(raw: bytes) -> None:
    with pytest.raises(BundleCorrupt):
        from_json(raw)


def test_a_report_of_another_format_is_refused(report: Report) -> None:
    with pytest.raises(BundleCorrupt, match="format"):
        from_json(to_json(report).replace(b'"format": 1', b'"format": 2'))


def test_an_arm_that_is_not_there(report: Report) -> None:
    with pytest.raises(BundleCorrupt, match="lacks"):
        report.arm("magic")


def test_every_arm_keeps_the_native_first_page(store: CaptureStore) -> None:
    one, two = (store.get(d)[:64] for d in documents(2, 64))
    mapper = Mapper(swapped_heads(), store.spec, store.spec, 8)
    for arm in arms(Case(one, one, two, two), {"mapped": mapper}, 8, 0):
        if arm.cache is not None:  # the source's own cache is this one, too
            torch.testing.assert_close(arm.cache.k[:8], one.k[:8])
            assert len(arm.cache) == {"first_page": 8, "tail16": 48}.get(arm.name, 64)
            assert len(arm.cache) + arm.tail == arm.start or arm.name == "first_page"


def test_noise_has_the_moments_of_the_cache() -> None:
    g = torch.Generator().manual_seed(0)
    kv = KV(torch.randn(4000, 1, 1, 3, generator=g) * 5 + 10, torch.randn(4000, 1, 1, 3, generator=g))
    found = noise(kv, 3)
    torch.testing.assert_close(found.k.float().mean(0), kv.k.mean(0), rtol=0.05, atol=0.1)
    torch.testing.assert_close(found.k.float().std(0), kv.k.std(0), rtol=0.05, atol=0.1)
    assert torch.equal(found.k, noise(kv, 3).k)


@pytest.mark.parametrize("options", [EvalOptions(prefix=60, page_size=8), EvalOptions(prefix=8, page_size=8)])
def test_the_prefix_is_whole_pages(store: CaptureStore, options: EvalOptions) -> None:
    with pytest.raises(ConfigError, match="whole pages"):
        Evaluator(store, store, identity(), options)


def test_one_document_is_not_enough(store: CaptureStore) -> None:
    with pytest.raises(ConfigError, match="two documents"):
        evaluate(Evaluator(store, store, identity(), OPTIONS), documents(1, 80), [], QUIET)


def test_a_short_document_is_refused(store: CaptureStore) -> None:
    with pytest.raises(ConfigError, match="too short"):
        evaluate(Evaluator(store, store, identity(), OPTIONS), documents(2, 70), [], QUIET)
