"""What a wrong command line says: one line, which names the option, the value and the fix; exit status not 0."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moonpool.cli import main
from tests.ops.support import small_pool

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: status, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moonpool", *arguments])
        status = 0
        start = time.monotonic()
        try:
            main()
        except SystemExit as e:
            status = e.code if isinstance(e.code, int) else 1 if e.code else 0
        assert time.monotonic() - start < 5
        out, err = capsys.readouterr()
        return status, out, err

    return run


def refused(run: Run, *arguments: str) -> str:
    status, out, err = run(*arguments)
    assert status == 2
    assert out == ""
    *logged, said = err.splitlines()
    assert all(" INFO " in line for line in logged), "one line, no traceback"
    return said


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("10.0.0.1:5000", "a host with a port"),
        ("", "an empty address"),
        ("tcp://10.0.0.1:5000", "a host with a port"),
        ("http://x", "unknown scheme"),
        (" 127.0.0.1", "spaces"),
        ("/run/x", "a path"),
    ],
)
@pytest.mark.parametrize("command", [["metadata"], ["serve", "model", "--master", "x:1"], ["up"]])
def test_i4_a_host_that_is_none(run: Run, host: str, says: str, command: list[str]) -> None:
    assert says in refused(run, *command, "--host", host)


def test_i4_an_advertised_host_with_a_port(run: Run, tmp_path: Path) -> None:
    at = str(tmp_path / "m0")
    said = refused(run, "messenger", "--socket", at, "--listen", "127.0.0.1:0", "--advertise", "10.0.0.1:5000")
    assert "a host with a port" in said


def test_i5_a_wildcard_is_not_advertised(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    said = refused(
        run, "messenger", "--socket", str(tmp_path / "m0"), "--listen", "0.0.0.0:0", "--secret-file", str(secret)
    )
    assert "advertise" in said


@pytest.mark.parametrize("command", ["master", "messenger"])
def test_j2_a_busy_metrics_port_is_called_that(run: Run, tmp_path: Path, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(run, command, "--socket", str(tmp_path / "s"), "--http", f"127.0.0.1:{port}")
    assert f"{command} metrics port {port}" in said
    assert "in use" in said


@pytest.mark.parametrize("option", ["--listen", "--http"])
@pytest.mark.parametrize("command", ["master", "messenger"])
def test_nothing_listens_beyond_loopback_without_a_secret(run: Run, tmp_path: Path, command: str, option: str) -> None:
    said = refused(run, command, "--socket", str(tmp_path / "s"), option, "0.0.0.0:0")
    assert "without a secret" in said
    assert "MOONPOOL_SECRET_FILE" in said


def test_a_socket_that_is_given_as_a_port(run: Run, tmp_path: Path) -> None:
    assert "a path, where host:port is wanted" in refused(
        run, "master", "--socket", "s", "--listen", str(tmp_path / "x")
    )


@pytest.mark.parametrize("command", ["stat", "top", "quota"])
def test_a_master_that_is_not_there(run: Run, tmp_path: Path, command: str) -> None:
    said = refused(run, command, "--master", str(tmp_path / "nobody"))
    assert str(tmp_path / "nobody") in said


def test_a_misspelt_flag_and_a_misspelt_variable(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, err = run("messenger", "--capacty", "5")
    assert status == 2
    assert "--capacity" in err
    monkeypatch.setenv("MOONPOOL_CAPACTY", "5")
    assert "Did you mean MOONPOOL_CAPACITY" in refused(run, "messenger", "--socket", str(tmp_path / "s"))


def test_stat_quota_and_drain_by_their_commands(run: Run, tmp_path: Path) -> None:
    with small_pool(tmp_path) as small:
        small.client().put("key", b"x" * 1000)
        status, out, _ = run("stat", "--master", small.master)
        assert (status, "m0" in out, "serving" in out) == (0, True, True)
        assert run("quota", "--master", small.master, "t", "1GiB")[1] == "t: 0 B of 1,073,741,824 B\n"
        assert run("quota", "--master", small.master, "t")[1] == "t: 0 B of 1,073,741,824 B\n"
        assert run("quota", "--master", small.master, "t", "none")[1] == ""
        assert "not a size" in refused(run, "quota", "--master", small.master, "t", "much")
        assert "not a tenant's name" in refused(run, "quota", "--master", small.master, "a b", "1")
        status, out, _ = run("drain", "m0", "--master", small.master)
        assert (status, "m0 is empty (1 objects moved, 1,000 B)" in out) == (0, True)
        assert small.hosts[0].service.draining
        assert run("drain", "m0", "--undo", "--master", small.master)[0] == 0
        assert not small.hosts[0].service.draining
        status, _, err = run("drain", "m7", "--master", small.master)
        assert (status, "no such messenger" in err) == (2, True)
