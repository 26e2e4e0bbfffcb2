"""The cost model gives the design's own tables from nothing but each model's `config.json`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.c2c.cost import (
    ALPHA,
    VARIANTS,
    PairCost,
    cheapest_variant,
    conversion_flops,
    decide,
    kv_bytes,
    pair_cost,
    parameters,
    prefill_flops,
    profile,
    span_flops,
)
from moonpool.c2c.signature import ModelSpec, load_shape
from moonpool.errors import ModelError

_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES = {
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8),
    "Qwen3-4B": (2560, 9728, 36, 32, 8),
    "Qwen3-8B": (4096, 12288, 36, 32, 8),
    "Qwen3-14B": (5120, 17408, 40, 40, 8),
    "Qwen3-32B": (5120, 25600, 64, 64, 8),
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4),
}


def config(name: str) -> dict[str, Any]:
    third = name.startswith("Qwen3")
    return {
        **dict(zip(_FIELDS, SIZES[name], strict=True)),
        "model_type": "qwen3" if third else "qwen2",
        **({"head_dim": 128} if third else {}),
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
    }


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    root = tmp_path_factory.mktemp("configs")
    for name in SIZES:
        (root / f"{name}.json").write_text(json.dumps(config(name)))
    return {name: load_shape(root / f"{name}.json") for name in SIZES}


def test_a_bare_config_is_enough(specs: dict[str, ModelSpec]) -> None:
    small = specs["Qwen3-0.6B"]
    assert (small.name, small.revision, small.tokenizer) == ("Qwen3-0.6B", "", "")
    assert round(parameters(small) / 1e6) == 440
    assert kv_bytes(small) == 114688


C, F1, F4, F8, R, HL = "C2C-shape", "F-1", "F-4", "F-8", "F-4+R256", "HL-4"


@pytest.mark.parametrize(
    ("source", "target", "prefill", "converted"),
    [
        (
            "Qwen3-4B",
            "Qwen3-0.6B",
            "1.00 1.35 4.64",
            {C: "0.940", F1: "0.117", F4: "0.470", F8: "0.940", R: "0.617", HL: "0.059"},
        ),
        ("Qwen3-8B", "Qwen3-1.7B", "2.94 3.29 6.58", {C: "0.940", F4: "0.470", R: "0.617", HL: "0.059"}),
        (
            "Qwen2.5-1.5B",
            "Qwen2.5-0.5B",
            "0.76 0.89 2.12",
            {C: "0.642", F1: "0.003", F4: "0.013", F8: "0.025", R: "0.041"},
        ),
        (
            "Qwen2.5-7B",
            "Qwen2.5-0.5B",
            "0.76 0.89 2.12",
            {C: "0.667", F1: "0.006", F4: "0.025", F8: "0.050", R: "0.079"},
        ),
        (
            "Qwen3-1.7B",
            "Qwen3-8B",
            "14.2 15.1 23.6",
            {C: "1.209", F1: "0.151", F4: "0.604", F8: "1.208", R: "0.793", HL: "0.075"},
        ),
        (
            "Qwen3-14B",
            "Qwen3-32B",
            "63.5 66.7 96.8",
            {C: "2.150", F1: "0.268", F4: "1.074", F8: "2.147", R: "1.409", HL: "0.134"},
        ),
    ],
)
def test_flops_of_the_design_table(
    specs: dict[str, ModelSpec], source: str, target: str, prefill: str, converted: dict[str, str]
) -> None:
    s, t = specs[source], specs[target]
    for context, printed in zip((1024, 4096, 32768), prefill.split(), strict=True):
        assert f"{prefill_flops(t, context) / 1e9:.{len(printed.partition('.')[2])}f}" == printed
    found = {v: conversion_flops(v, s, t) for v in VARIANTS}
    assert {v: f"{f / 1e9:.3f}" for v, f in found.items() if f is not None and v in converted} == converted
    assert (found[HL] is None) == (HL not in converted)


def test_weights_of_the_design_table(specs: dict[str, ModelSpec]) -> None:
    """MiB in bf16: as many bytes as a token takes FLOP."""
    pair = specs["Qwen3-4B"], specs["Qwen3-0.6B"]
    mib = {v: round((conversion_flops(v, *pair) or 0) / (1 << 20)) for v in VARIANTS}
    assert (mib[F1], mib[F4], mib[F8], mib[HL], mib[C]) == (112, 448, 896, 56, 897)
    assert conversion_flops(F4, specs["Qwen2.5-1.5B"], specs["Qwen2.5-0.5B"]) == 12 << 20


def cost(specs: dict[str, ModelSpec], pair: tuple[str, str], where: tuple[str, str], variant: str) -> PairCost:
    s, t = specs[pair[0]], specs[pair[1]]
    return pair_cost(profile(*where), s, t, conversion_flops(variant, s, t) or 0)


@pytest.mark.parametrize(
    ("pair", "prefill", "convert", "target", "source"),
    [
        (("Qwen3-4B", "Qwen3-0.6B"), (3.4, 27, 1351), (1.2, 9.4, 47, 470), (10.4, 5.2, 2.5), 13.4),
        (("Qwen3-8B", "Qwen3-1.7B"), (8.2, 66, 3288), (1.2, 9.4, 47, 470), (10.4, 5.2, 2.5), 13.4),
        (("Qwen2.5-7B", "Qwen2.5-0.5B"), (2.2, 18, 892), (0.06, 0.5, 2.5, 25), (1.1, 0.6, 0.3), 5.2),
        (("Qwen3-1.7B", "Qwen3-8B"), (37.75, 302, 15099), (1.5, 12, 60, 604), (13.4, 6.7, 3.3), 10.4),
    ],
)
def test_times_of_the_design_table(
    specs: dict[str, ModelSpec],
    pair: tuple[str, str],
    prefill: tuple[float, ...],
    convert: tuple[float, ...],
    target: tuple[float, ...],
    source: float,
) -> None:
    def close(found: float, printed: float) -> None:
        places = len(str(printed).partition(".")[2])
        assert round(found * 1e6, places) == printed

    for hardware, printed in zip(("big-gpu", "small-gpu", "cpu"), prefill, strict=True):
        close(cost(specs, pair, (hardware, "100gbe"), F4).prefill_s(0, 4096) / 4096, printed)
    for hardware, printed in zip(("big-gpu", "small-gpu", "cpu-amx", "cpu"), convert, strict=True):
        close(cost(specs, pair, (hardware, "100gbe"), F4).convert_s, printed)
    for network, printed in zip(("100gbe", "pcie4", "400g"), target, strict=True):
        close(cost(specs, pair, ("cpu", network), F4).fetch_target_s, printed)
    close(cost(specs, pair, ("cpu", "100gbe"), F4).fetch_source_s, source)


@pytest.mark.parametrize(
    ("pair", "where", "ahead", "on_load", "on_load_f4"),
    [
        (("Qwen3-4B", "Qwen3-0.6B"), ("big-gpu", "100gbe"), "0.3", "0.25", "0.23"),
        (("Qwen3-4B", "Qwen3-0.6B"), ("big-gpu", "400g"), "1.3", "1.0", "0.8"),
        (("Qwen3-4B", "Qwen3-0.6B"), ("small-gpu", "100gbe"), "2.6", "1.9", "1.2"),
        (("Qwen3-8B", "Qwen3-1.7B"), ("small-gpu", "100gbe"), "6.3", "4.5", "2.9"),
        (("Qwen2.5-1.5B", "Qwen2.5-0.5B"), ("small-gpu", "100gbe"), "16", "6.7", "6.2"),
        (("Qwen2.5-7B", "Qwen2.5-0.5B"), ("big-gpu", "100gbe"), "2.0", "0.43", "0.42"),
        (("Qwen3-1.7B", "Qwen3-8B"), ("big-gpu", "400g"), "12", "14", "9.3"),
        (("Qwen3-14B", "Qwen3-32B"), ("big-gpu", "400g"), "29", "42", "26"),
        (("Qwen3-14B", "Qwen3-32B"), ("cpu", "100gbe"), None, "447", "61"),
    ],
)
def test_speed_ups_of_the_design_table(
    specs: dict[str, ModelSpec], pair: tuple[str, str], where: tuple[str, str], ahead: str | None, on_load: str,
    on_load_f4: str,
) -> None:  # fmt: skip
    cheap = cost(specs, pair, where, cheapest_variant(specs[pair[0]], specs[pair[1]]))
    prefill = cheap.prefill_s(0, 4096) / 4096

    def shown(seconds: float, printed: str) -> str:
        return f"{prefill / seconds:.{len(printed.partition('.')[2])}f}"

    # One cell of the design is not its own formula's value: 1.5B → 0.5B by F-1 is printed as 6.5, which is F-2's.
    assert ahead is None or shown(cheap.ahead_s, ahead) == ahead
    assert shown(cheap.on_load_s, on_load) == on_load
    assert shown(cost(specs, pair, where, F4).on_load_s, on_load_f4) == on_load_f4


def test_least_tokens_of_the_design(specs: dict[str, ModelSpec]) -> None:
    """1–5 ms over ~25 µs a token for 1.7B → 8B on a big GPU: 40–200 tokens."""
    found = cost(specs, ("Qwen3-1.7B", "Qwen3-8B"), ("big-gpu", "100gbe"), F4)
    assert 70 < found.least_tokens(found.ahead_s, 4096) < 90, "2 ms"
    slow = cost(specs, ("Qwen3-4B", "Qwen3-0.6B"), ("big-gpu", "100gbe"), F4)
    assert slow.least_tokens(slow.ahead_s, 4096) == math.inf


def test_the_decision_and_its_reason(specs: dict[str, ModelSpec]) -> None:
    good = cost(specs, ("Qwen3-1.7B", "Qwen3-8B"), ("big-gpu", "400g"), HL)
    assert decide(good, 0, 4096).pays
    assert decide(good, 0, 496).reason == "too_short", "below the floor of a GPU"
    slow = cost(specs, ("Qwen3-4B", "Qwen3-0.6B"), ("big-gpu", "100gbe"), F4)
    assert decide(slow, 0, 4096).reason == "too_slow"
    assert decide(slow, 0, 40960, on_load=False).reason == "too_slow"
    big_context = decide(good, 16384, 20480)
    assert big_context.prefill_s > decide(good, 0, 4096).prefill_s, "attention grows with what lies before"


def test_only_the_ways_that_are_open_count(specs: dict[str, ModelSpec]) -> None:
    """7B → 0.5B: reading the large source's pages dominates, so only what was converted ahead is fast enough."""
    found = cost(specs, ("Qwen2.5-7B", "Qwen2.5-0.5B"), ("big-gpu", "100gbe"), F4)
    assert decide(found, 0, 1024, on_load=False).reason == "too_short", "2 ms for a saving of a few µs a token"
    assert decide(found, 0, 8192, on_load=False).pays
    assert decide(found, 0, 8192, ahead=False).reason == "too_slow"


def test_a_page_is_not_made_when_it_cannot_pay(specs: dict[str, ModelSpec]) -> None:
    def refusal(pair: tuple[str, str], where: tuple[str, str], variant: str, start: int = 16) -> str:
        return cost(specs, pair, where, variant).page_refusal(start, start + 16)

    assert refusal(("Qwen3-1.7B", "Qwen3-8B"), ("cpu", "100gbe"), F4) == ""
    assert refusal(("Qwen3-4B", "Qwen3-0.6B"), ("big-gpu", "100gbe"), F4) == "fetch_slower_than_prefill"
    assert refusal(("Qwen3-4B", "Qwen3-0.6B"), ("small-gpu", "100gbe"), C) == "convert_slower_than_prefill"
    late = refusal(("Qwen3-4B", "Qwen3-0.6B"), ("small-gpu", "100gbe"), C, start=32768)
    assert late == "", "far behind, attention makes computing the page dearer than converting it"


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(1, 5000), st.floats(0, 1e-2), st.floats(0, 1e-2))
def test_more_tokens_never_turn_a_yes_into_a_no(start: int, tokens: int, per_token: float, overhead: float) -> None:
    target = _tiny()
    found = PairCost(
        target=target, prefill_rate=1e9, convert_s=per_token, fetch_source_s=1e-6, fetch_target_s=1e-6,
        overhead_s=overhead, min_tokens=8,
    )  # fmt: skip
    before = found.judge(start, start + tokens, found.on_load_s * tokens)
    after = found.judge(start, start + 2 * tokens, found.on_load_s * 2 * tokens)
    assert after.pays or not before.pays
    if before.pays:
        assert before.serve_s < ALPHA * before.prefill_s


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_spans_add_up(a: int, b: int, c: int) -> None:
    spec = _tiny()
    whole = span_flops(spec, a, a + b + c)
    assert whole == span_flops(spec, a, a + b) + span_flops(spec, a + b, a + b + c)


def _tiny() -> ModelSpec:
    from tests.c2c.support import spec

    tiny = spec("tiny")
    return type(tiny)(**{f: getattr(tiny, f) for f in tiny.__struct_fields__} | {"intermediate": 64})


def test_experts_count_as_far_as_a_token_meets_them(tmp_path: Path) -> None:
    moe = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 100}
    (tmp_path / "moe.json").write_text(json.dumps({**config("Qwen3-0.6B"), **moe, "mlp_only_layers": list(range(14))}))
    assert load_shape(tmp_path / "moe.json").intermediate == (200 + 3072) // 2


def test_an_unknown_width_is_an_error_not_a_free_layer(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(
        json.dumps({k: v for k, v in config("Qwen3-4B").items() if k != "intermediate_size"})
    )
    with pytest.raises(ModelError, match="intermediate_size"):
        prefill_flops(load_shape(tmp_path / "m.json"), 1024)
