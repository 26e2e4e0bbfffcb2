"""The main job on the bundled pair, through everything that serves: one model's prefill answers another model's requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moonpool import paths
from moonpool.demo import FIGURES, run_demo
from moonpool.errors import BundleError, ConfigError, ConversionError
from moonpool.system import System, bundled_system, load_system
from moonpool.testing.leaks import no_leaks


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_target_answers_from_converted_pages_and_only_from_the_right_ones() -> None:
    with no_leaks():
        f = run_demo("moon-large", "moon-small", None, tokens=448, documents=2)
    assert json.loads(FIGURES.read_text())[0]["pair"] == "moon-large→moon-small"
    assert f.recall_native >= 0.95
    assert f.native_tokens >= 400
    assert f.converted_tokens >= 384, "all whole pages but the first, the last and those whose logits were asked for"
    assert f.recall_converted >= 0.3, "chance is 0.08"
    assert f.recall_wrong_document <= 0.2, "a wrong cache must give wrong answers"
    assert f.recall_no_document <= 0.2
    assert f.kl < 0.5
    assert f.top1 > 0.75


def test_a_bundle_for_other_models_is_refused_with_the_field(tmp_path: Path) -> None:
    folder = paths.repo_dir("bundles")
    assert folder is not None
    with pytest.raises(ConversionError, match="differs in"):
        run_demo("moon-small", "moon-large", folder / "moon-large-to-moon-small", tokens=64, documents=1)


def test_a_bundle_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such bundle folder"):
        run_demo("moon-large", "moon-small", tmp_path / "nothing", tokens=64, documents=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BundleError):
        run_demo("moon-large", "moon-small", tmp_path / "empty", tokens=64, documents=1)


def test_a_system_file_finds_models_by_name_and_names_its_mistakes(tmp_path: Path) -> None:
    file = tmp_path / "system.yaml"
    file.write_text("c2c: {models: {large: {ref: moon-large}}, rules: []}\ninstances: [large]\n")
    config, c2c = load_system(file)
    assert config.instances == ["large"]
    assert c2c.models["large"].spec.num_layers == 8
    file.write_text("c2c: {models: {}, rules: []}\nsrever: {port: 1}\n")
    with pytest.raises(ConfigError, match="Did you mean `server`"):
        load_system(file)


def test_an_instance_that_no_model_is_named_for() -> None:
    _, c2c = bundled_system()
    with pytest.raises(ConfigError, match="unknown model `medium` under instances"):
        System(c2c, capacity=1 << 20, serve=["medium"])


def test_a_pool_smaller_than_a_page_serves_without_storing() -> None:
    from moonpool.engine.request import GenerateRequest

    _, c2c = bundled_system()
    with System(c2c, capacity=4096, serve=["moon-small"]) as system:
        instance = system.instances["moon-small"]
        prompt = instance.encode("Ada: green\nLeo: lamp\nZoe: river\nMax: tiger\nNina: violet\nOlga: stone\nAda:")
        for _ in range(2):
            result = instance.generate(GenerateRequest(prompt=prompt, max_tokens=1))
            assert result.text == " green"
            assert result.usage.native == 0
        instance.flush()
        assert system.pool.stats().objects == 0
