"""`moonpool c2c status`, `disable`, `enable` against a pool in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from moonpool.cli import main
from moonpool.store.master.service import MasterService
from moonpool.types import RuleStatus
from moonpool.wire.rpc import Server
from tests.c2c.pairs import BUNDLE, config, model, rule

FUSION = rule(model("small"), model("tiny"), mode="fuse", digest="d" * 32)
CONFIG = replace(
    config(rule(model("large"), model("small")), rule(model("large"), model("tiny"), mode="on_miss", digest="c" * 32)),
    fusions=[FUSION],
)
Run = Callable[..., str]


@pytest.fixture
def master(tmp_path: Path) -> object:
    service = MasterService(CONFIG.encode())
    server = Server(str(tmp_path / "master"), service, name="master")
    yield service
    server.close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["moonpool", "c2c", *arguments, "--master", str(tmp_path / "master")])
        try:
            main()
        except SystemExit as e:
            if e.code:
                raise AssertionError(capsys.readouterr().err) from e
        return capsys.readouterr().out

    return run


def report(master: MasterService) -> None:
    said = RuleStatus(name="large→small", digest=BUNDLE, mode="on_put", state="ready", gate="forced", reason="top1 low")
    master._rules.report("converter", [said])
    master._rules.report(
        "engine", [RuleStatus(name="large→small", digest=BUNDLE, requests=40, checks=4, kl=0.5, agreed=3)]
    )


def test_status_shows_verdicts_checks_and_rules_that_nobody_runs(master: MasterService, run: Run) -> None:
    assert run("status").count("nobody converts") == 2
    report(master)
    spoken, silent = (line for line in run("status").splitlines() if "large→" in line)
    for shown in ("large→small", BUNDLE[:12], "on_put", "ready", "forced", "40", "0.125", "75 %", "top1 low"):
        assert shown in spoken
    assert "on_miss" in silent
    assert "nobody converts" in silent


def test_a_fuse_rule_is_shown_with_why_it_has_no_gate_and_cannot_be_disabled(master: MasterService, run: Run) -> None:
    (line,) = (line for line in run("status").splitlines() if "small→tiny" in line)
    assert "engine's own" in line
    (shown,) = (r for r in json.loads(run("status", "--json"))["rules"] if r["mode"] == "fuse")
    assert (shown["digest"], shown["gate"], shown["state"]) == (FUSION.digest, "", "")
    assert "no gate" in shown["reason"]
    with pytest.raises(AssertionError, match="take it out of the C2C file"):
        run("disable", "small:tiny")


def test_disable_shows_why_and_enable_undoes_it(master: MasterService, run: Run) -> None:
    report(master)
    assert run("disable", "large:small", "--reason", "looks odd") == "large→small is disabled\n"
    found = json.loads(run("status", "--json"))
    assert found["disabled"] == {BUNDLE: "looks odd"}
    assert [(r["state"], r["reason"]) for r in found["rules"] if r["digest"] == BUNDLE] == [("disabled", "looks odd")]
    assert run("enable", BUNDLE[:8]) == "large→small is enabled\n"
    assert master.rules().disabled == {}


def test_a_rule_that_there_is_not_is_named(
    master: MasterService, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError, match=r"no such rule.*large→small"):
        run("enable", "small:large")
    with pytest.raises(AssertionError, match="not disabled"):
        run("enable", "large:small")
