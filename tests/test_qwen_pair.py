"""The main job on a pair of real models. Needs their folders in MOONPOOL_MODELS and a fitted bundle (README)."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool import paths
from moonpool.demo import run_demo

SOURCE, TARGET = "qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct"


@pytest.mark.slow
def test_converted_pages_carry_facts_between_real_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not all(Path(paths.find_model(m)).is_dir() for m in (SOURCE, TARGET)):
        pytest.skip(f"no {SOURCE} and {TARGET} in MOONPOOL_MODELS")
    bundle = paths.cache_dir() / "fits" / f"{SOURCE}-to-{TARGET}"
    if not bundle.is_dir():
        pytest.skip(f"no bundle {bundle}: fit it first (README)")
    monkeypatch.chdir(tmp_path)
    f = run_demo(SOURCE, TARGET, bundle, tokens=512, documents=1)
    assert f.converted_tokens >= 448
    assert f.recall_native >= 0.9
    assert f.recall_converted > f.recall_wrong_document
    assert f.ttft_converted_s < f.ttft_cold_s
