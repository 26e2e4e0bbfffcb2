"""The pass over the KV: kept on disk, resumed where it stopped, and never done twice; its memory is known beforehand."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from moonpool.c2c.fitting import gather
from moonpool.c2c.fitting.capture import KV, CaptureStore
from moonpool.c2c.fitting.gather import Documents, Pass, Weighting
from moonpool.c2c.fitting.moments import Moments
from moonpool.c2c.fitting.prepare import FitOptions, prepare
from moonpool.c2c.fitting.ridge import fit_linear
from moonpool.errors import ConfigError
from moonpool.testing.fake_clock import FakeClock
from tests.c2c.tiny import documents, tiny_model

QUIET = Console(quiet=True)


class Counted(CaptureStore):
    """Fails at document number `most`, as a machine that goes down does."""

    most = 1 << 30
    read = 0

    def get(self, tokens: torch.Tensor) -> KV:
        self.read += 1
        if self.read > self.most:
            raise InterruptedError
        return super().get(tokens)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gather")
    tiny_model(root / "large", layers=3)
    tiny_model(root / "small", layers=2, dim=8, seed=1)
    return root


def stores(models: Path, work: Path) -> tuple[Counted, CaptureStore]:
    return Counted(work, models / "large"), CaptureStore(work, models / "small")


def same(a: Moments, b: Moments) -> None:
    every = range(3)
    torch.testing.assert_close(a.covariance(every, every), b.covariance(every, every), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(a.mean_x(every), b.mean_x(every), rtol=1e-4, atol=1e-5)
    assert (a.weight, a.done) == (b.weight, b.done)


def test_an_interrupted_pass_goes_on_where_it_was_saved(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "ROWS_AT_ONCE", 64)
    monkeypatch.setattr(gather, "SAVE_EVERY", 0.0)
    told = documents(5, 64)
    source, target = stores(models, tmp_path)
    source.most = 3
    with pytest.raises(InterruptedError):
        Pass(source, target, Weighting()).moments(told, QUIET, FakeClock())
    source.read, source.most = 0, 1 << 30
    resumed = Pass(source, target, Weighting()).moments(told, QUIET, FakeClock())
    assert source.read == 3, "two documents make a block, which was saved; the third was read in vain"
    same(resumed, Pass(*stores(models, tmp_path / "again"), Weighting()).moments(told, QUIET, FakeClock()))


def test_a_second_fit_reads_no_training_document(models: Path, tmp_path: Path) -> None:
    parts = Documents(documents(3, 64), documents(2, 64, seed=50))
    source, target = stores(models, tmp_path)
    fit_linear(source, target, parts, FitOptions(layers_per_target=1), QUIET)
    source.read = 0
    found = fit_linear(source, target, parts, FitOptions(layers_per_target=2, lambdas=(1e-2,)), QUIET)
    assert source.read == 2, "the held-out documents alone"
    assert found.tokens == 3 * 63


def test_what_changes_the_rows_changes_the_file(models: Path, tmp_path: Path) -> None:
    told = documents(3, 64)
    source, target = stores(models, tmp_path)
    gains = torch.ones(2, 8)
    paths = {
        Pass(source, target, Weighting()).moments_path(told),
        Pass(source, target, Weighting(attention=0.5)).moments_path(told),
        Pass(source, target, Weighting(gains=gains)).moments_path(told),
        Pass(source, target, Weighting()).moments_path(told[:2]),
        Pass(source, target, Weighting()).moments_path([told[1], told[0], told[2]]),
        Pass(target, source, Weighting()).moments_path(told),
    }
    assert len(paths) == 6


def test_the_memory_bound_is_stated_and_kept_to(models: Path, tmp_path: Path) -> None:
    source, target = stores(models, tmp_path)
    parts = Documents(documents(1, 64), documents(1, 64, seed=50))
    shown = io.StringIO()
    prepare(source, target, parts, FitOptions(), Console(file=shown))
    assert "GB at most" in shown.getvalue()
    with pytest.raises(ConfigError, match="more memory than allowed"):
        prepare(source, target, parts, FitOptions(memory=1 << 10), QUIET)
    with pytest.raises(ConfigError, match="documents are needed"):
        prepare(source, target, Documents([], parts.choose), FitOptions(), QUIET)
