"""Q3: secrets are nowhere to be read: no page, no log at any level, no printed settings, no error."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from moonpool.testing.leaks import eventually, no_leaks
from tests.ops.support import Command

pytestmark = pytest.mark.cluster
CANARY, ADMIN, API_KEY = "canary-5f2d-secret-of-the-pool", "canary-a11c-secret-of-admins", "canary-9b3e-api-key"
ROUTES = ("/healthz", "/readyz", "/metrics", "/", "/settings", "/env", "/docs", "/openapi.json")


def test_q3_a_canary_secret_shows_up_nowhere(tmp_path: Path) -> None:
    environment = {**os.environ, "MOONPOOL_LOG_LEVEL": "debug", "MOONPOOL_API_KEY": API_KEY}
    for name, secret in (("SECRET", CANARY), ("ADMIN_SECRET", ADMIN)):
        file = tmp_path / f"{name.lower()}"
        file.write_text(secret)
        file.chmod(0o600)
        environment[f"MOONPOOL_{name}_FILE"] = str(file)
    wrong = tmp_path / "wrong"
    wrong.write_text("canary-0000-a-wrong-secret")
    wrong.chmod(0o600)
    master, messenger = str(tmp_path / "m"), str(tmp_path / "m0")
    seen: list[str] = []
    http = ["--http", "127.0.0.1:0", "--log-format", "json"]
    with (
        no_leaks(),
        Command(tmp_path, ["master", "--socket", master, *http], environment) as first,
        Command(
            tmp_path, ["messenger", "--name", "m0", "--socket", messenger, "--master", master, *http], environment
        ) as second,
    ):
        for process in (first, second):
            assert process.says("metrics at"), process.text()
            found = re.search(r"http://127\.0\.0\.1:\d+", process.text())
            assert found
            assert eventually(lambda at=found[0]: httpx.get(f"{at}/readyz").status_code == 200)  # type: ignore[misc]
            seen += [httpx.get(found[0] + route).text for route in ROUTES]
        for arguments, change in (
            (["stat", "--json"], {}),
            (["stat"], {"MOONPOOL_SECRET_FILE": str(wrong), "MOONPOOL_ADMIN_SECRET_FILE": ""}),
            (["quota", "t", "5"], {"MOONPOOL_ADMIN_SECRET_FILE": str(wrong)}),
            (["stat"], {"MOONPOOL_SECRET_FILE": "/nowhere"}),
        ):
            with Command(tmp_path, ["-v", *arguments, "--master", master], {**environment, **change}) as command:
                command.process.wait(30)
                assert bool(change) == (command.process.returncode != 0), command.text()
                seen.append(command.text())
        assert second.end(signal.SIGTERM) == 0
        assert first.end(signal.SIGTERM) == 0
        seen += [first.text(), second.text()]
    assert "settings" in seen[-1]
    assert str(tmp_path / "secret") in seen[-1], "the file's name is shown, its content not"
    for line in seen[-1].splitlines():
        json.loads(line)
    for text in seen:
        for secret in (CANARY, ADMIN, API_KEY, "canary-0000"):
            assert secret not in text
