"""Head-local and trunk fits, beside the full-head fit on the same moments."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console

from moonpool.c2c.fitting.capture import CaptureStore
from moonpool.c2c.fitting.coded import fit_coded
from moonpool.c2c.fitting.features import rows
from moonpool.c2c.fitting.gather import Documents, Pass, Weighting, key_gains
from moonpool.c2c.fitting.headlocal import fit_head_local
from moonpool.c2c.fitting.lookback import fit_lookback
from moonpool.c2c.fitting.prepare import FitOptions, prepare
from moonpool.c2c.fitting.ridge import fit_linear
from moonpool.c2c.fitting.scores import scores
from moonpool.c2c.fitting.selection import solve
from moonpool.c2c.fitting.trunk import fit_trunk
from moonpool.c2c.projectors.base import Projector
from moonpool.errors import ConfigError, ConversionRefused
from tests.c2c.tiny import documents, tiny_model

QUIET = Console(quiet=True)
PARTS = Documents(documents(6, 128), documents(2, 128, seed=50))
Stores = tuple[CaptureStore, CaptureStore]
LAYER = 64
"""Columns of one source layer."""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    root = tmp_path_factory.mktemp("variants")
    large, small = tiny_model(root / "large", layers=4), tiny_model(root / "small", layers=3, dim=8, seed=1)
    return CaptureStore(root / "kept", large), CaptureStore(root / "kept", small)


def test_a_trunk_of_full_rank_is_the_ridge_on_all_layers(stores: Stores) -> None:
    found = fit_trunk(*stores, PARTS, FitOptions(rank=1000), QUIET, lambdas=(1e-3,))
    start = prepare(*stores, PARTS, FitOptions(), QUIET)
    every = slice(0, start.moments.xy.shape[1])
    ridge = solve(start.moments, start.holdout, range(4), every, lambdas=(1e-3,))
    x = rows(stores[0].get(PARTS.choose[0]), stores[0].spec.rope)[1:]
    want = ridge.predict(x.flatten(2)).view(127, 3, 2, 16)
    torch.testing.assert_close(found.projector.project(x), want, rtol=1e-3, atol=1e-3)


def test_more_rank_leaves_less_and_the_held_out_rows_choose_the_ridge(stores: Stores) -> None:
    """Judged on what it was fitted on: held out, a wide latent of so few rows may do worse."""
    left, parts = [], Documents(PARTS.train, PARTS.train)
    for rank in (1, 8, 64):
        found = fit_trunk(*stores, parts, FitOptions(rank=rank), QUIET)
        left.append(sum(1 - layer.r2 for layer in found.layers))
        each = [fit_trunk(*stores, parts, FitOptions(rank=rank), QUIET, (r,)) for r in (1e-4, 1e-3, 1e-2)]
        assert left[-1] == pytest.approx(min(sum(1 - layer.r2 for layer in f.layers) for f in each))
    assert left == sorted(left, reverse=True)
    assert left[0] > left[2] * 1.1


def test_a_trunks_values_are_repaired_from_its_latent(stores: Stores) -> None:
    options = FitOptions(rank=24, judged_documents=2, queries=16)
    plain = fit_trunk(*stores, PARTS, options, QUIET)
    repaired = fit_trunk(*stores, PARTS, msgspec.structs.replace(options, repair_values=True), QUIET)
    rows_ = Pass(*stores, Weighting())
    before, after = (scores(rows_, f.projector, PARTS.choose, 16) for f in (plain, repaired))
    gained = [b.values - a.values for b, a in zip(before, after, strict=True)]
    shares = [f.averaged for f in repaired.layers if f.half == "v"]
    assert [g > 1e-6 for g in gained] == [s > 0 for s in shares]
    assert min(gained) > -1e-6
    assert any(shares)
    assert [a.keys for a in after] == pytest.approx([b.keys for b in before])


def test_head_local_finds_a_models_own_heads(stores: Stores) -> None:
    source = stores[0]
    found = fit_head_local(source, source, PARTS, FitOptions(layers_per_target=1, window=0), QUIET)
    assert {(f.target_layer, *f.source_layers) for f in found.layers} == {(t, t) for t in range(4)}
    assert min(f.r2 for f in found.layers) > 0.999
    assert {f.head for f in found.layers} == {0, 1}


@pytest.mark.parametrize("shell", [False, True])
def test_variants_are_scored_alike(stores: Stores, shell: bool) -> None:
    options = FitOptions(layers_per_target=2, shell=shell, rank=48, choose="attention", judged_documents=2, queries=16)
    weighting = Weighting(gains=key_gains(stores[1]) if shell else None)
    full = fit_linear(*stores, PARTS, options, QUIET)
    measured = {
        "full": scores(Pass(*stores, weighting), full.projector, PARTS.choose, 16),
        "local": scores(
            Pass(*stores, weighting), fit_head_local(*stores, PARTS, options, QUIET).projector, PARTS.choose, 16
        ),
        "trunk": scores(
            Pass(*stores, weighting), fit_trunk(*stores, PARTS, options, QUIET).projector, PARTS.choose, 16
        ),
    }
    for layer in full.layers:
        score = measured["full"][layer.target_layer]
        assert layer.error == pytest.approx(score.keys if layer.half == "k" else score.values, rel=1e-3)
        if layer.half == "v":
            assert layer.r2 == pytest.approx(score.r2_values, abs=0.05)
    assert all(0 < s.both < 2 and s.keys > 0 and s.values > 0 for found in measured.values() for s in found)


def test_head_local_is_refused_between_unequal_heads(stores: Stores, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    one = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1,
        )
    )  # fmt: skip
    one.save_pretrained(tmp_path / "one")
    (tmp_path / "one" / "tokenizer.json").write_bytes((stores[0].folder / "tokenizer.json").read_bytes())
    with pytest.raises(ConversionRefused, match="equal KV-head counts"):
        fit_head_local(stores[0], CaptureStore(tmp_path, tmp_path / "one"), PARTS, FitOptions(), QUIET)


def test_a_code_of_the_token_explains_what_no_affine_map_can(stores: Stores) -> None:
    """The target's values of layer 0 are its own table of tokens. Judged on the rows of the fit: the tiny models' tokens are many
    and the documents few."""
    parts = Documents(PARTS.train, PARTS.train)
    plain = fit_trunk(*stores, parts, FitOptions(rank=64), QUIET, lambdas=(1e-3,)).projector
    code = fit_coded(*stores, parts, FitOptions(rank=64, code=4 * LAYER), QUIET, lambdas=(1e-3,)).projector
    assert left(stores, code)[0, 1] < 0.9 * left(stores, plain)[0, 1]


def test_looking_back_explains_what_the_token_alone_does_not(stores: Stores) -> None:
    """Half the code for the token, half for the one before: what the lowest layer attends to is no function of the token."""
    parts, options = Documents(PARTS.train, PARTS.train), FitOptions(rank=200, code=2 * LAYER, page_size=8)
    code = fit_coded(*stores, parts, options, QUIET, lambdas=(1e-3,)).projector
    looking = fit_lookback(*stores, parts, options, QUIET, lambdas=(1e-3,)).projector
    assert looking.page_size == 8
    assert left(stores, looking)[1].sum() < 0.9 * left(stores, code)[1].sum()


def left(stores: Stores, found: Projector) -> torch.Tensor:
    """Of the training rows' squares around their mean behind the first page, `[layers, 2]`."""
    x, y = (torch.cat([rows(s.get(d), s.spec.rope)[8:] for d in PARTS.train]) for s in stores)
    made = found.project(x)
    return (made - y).square().sum((0, 3)) / (y - y.mean(0)).square().sum((0, 3))


def test_a_code_is_whole_layers_wide(stores: Stores) -> None:
    for fit in (fit_coded, fit_lookback):
        with pytest.raises(ConfigError, match="multiple"):
            fit(*stores, PARTS, FitOptions(rank=8, code=LAYER + 1), QUIET)
