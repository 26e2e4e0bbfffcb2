"""Command lines, HTTP pages, and running other programs."""

from __future__ import annotations

import http.client
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moonpool.errors import ConfigError, ConnectionLost
from moonpool.integrations.mooncake_api import flags, http_pages, launch
from moonpool.integrations.mooncake_api.__main__ import main
from moonpool.integrations.mooncake_api.commands import client, master
from moonpool.integrations.mooncake_api.http_front import HttpThread
from moonpool.testing.leaks import no_leaks
from tests.integrations.fakes import FakeCluster, FakePool

KNOWN = {
    "port": flags.number(1),
    "on": flags.switch(),
    "off": flags.switch(True),
    "name": flags.Flag("x"),
    "ttl": flags.Flag(10.0, flags.duration),
    "size": flags.size(0),
}
IDLE = frozenset({"threads", "enable_ha"})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--port=5 --name=a", {"port": 5, "name": "a"}),
        ("-port 5 --name a=b", {"port": 5, "name": "a=b"}),
        ("--on --nooff", {"on": True, "off": False}),
        ("--on=false --off true", None),
        ("--ttl=5s --size=4GB", {"ttl": 5.0, "size": 4 << 30}),
        ("--ttl=250ms", {"ttl": 0.25}),
        ("--threads=4 --enable_ha --noenable_ha", {}),
    ],
)
def test_flags_as_the_peer_writes_them(line: str, expected: dict[str, object] | None) -> None:
    words = line.split()
    if expected is None:
        with pytest.raises(ConfigError, match="true: not a flag"):
            flags.parse(words, KNOWN, IDLE)
    else:
        defaults = {name: flag.default for name, flag in KNOWN.items()}
        assert flags.parse(words, KNOWN, IDLE) == defaults | expected


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--prot=5", "--port"),
        ("--port=x", "--port"),
        ("--port", "--port=VALUE"),
        ("--ttl=soon", "--ttl"),
        ("stray", "stray"),
        ("--config_path=/nowhere", "/nowhere"),
    ],
)
def test_a_bad_flag_is_named(line: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        flags.parse(line.split(), KNOWN, IDLE)


def test_flags_without_meaning_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    flags.parse(["--threads=4", "--enable_ha"], KNOWN, IDLE)
    assert [r.getMessage() for r in caplog.records] == ["without meaning here: --enable_ha=true, --threads=4"]


@pytest.mark.parametrize("text", ["port: 7\nname: from file\n", '{"port": 7, "name": "from file"}'])
def test_a_file_of_flags_gives_way_to_the_command_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "flags"
    file.write_text(text)
    given = flags.parse([f"--config_path={file}", "--name=typed"], KNOWN, IDLE)
    assert (given["port"], given["name"]) == (7, "typed")
    file.write_text("prot: 7")
    with pytest.raises(ConfigError, match="--port"):
        flags.parse([f"--config_path={file}"], KNOWN, IDLE)


def test_no_flag_is_both_meaningful_and_idle() -> None:
    for program in (master, client):
        assert not program.FLAGS.keys() & program.IDLE


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster("localhost:1", "localhost:2")


@pytest.fixture
def pages(cluster: FakeCluster) -> Iterator[HttpThread]:
    with no_leaks():
        pool = FakePool(cluster, "localhost:1")
        server = HttpThread(
            http_pages.admin_app(lambda: pool, pool.messengers, "127.0.0.1:50051"), "127.0.0.1", 0, "metrics"
        )
        yield server
        server.close()
        server.close()


def get(server: HttpThread, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


def test_admin_pages(pages: HttpThread, cluster: FakeCluster) -> None:
    FakePool(cluster, "localhost:2").put("k", b"12345")
    assert get(pages, "/get_all_segments") == (200, "localhost:1\nlocalhost:2\n")
    assert get(pages, "/get_all_keys") == (200, "k\n")
    assert json.loads(get(pages, "/query_key?key=k")[1])["data"][0]["transport_endpoint_"] == "localhost:2"
    assert get(pages, "/query_key?key=missing")[0] == 404
    found = json.loads(get(pages, "/batch_query_keys?keys=k,missing")[1])["data"]
    assert (found["k"]["ok"], found["missing"]["ok"]) == (True, False)
    assert get(pages, "/batch_query_keys")[0] == 400
    assert json.loads(get(pages, "/health")[1])["service_ready"] is True
    assert get(pages, "/query_segment?segment=localhost:1")[1].startswith("localhost:1\nUsed(bytes): ")
    assert get(pages, "/query_segment?segment=nowhere")[0] == 500
    assert get(pages, "/nothing")[0] == 404
    families = {f.name: f for f in text_string_to_metric_families(get(pages, "/metrics")[1])}
    assert families["master_active_clients"].samples[0].value == 2
    assert "master_total_capacity_bytes" in get(pages, "/metrics/summary")[1]
    cluster.failure = ConnectionLost("gone")
    assert get(pages, "/get_all_segments")[0] == 503


def test_client_pages(cluster: FakeCluster) -> None:
    answers = [0, 2]
    app = http_pages.client_app(lambda: answers.pop(0), FakePool(cluster).messengers)
    server = HttpThread(app, "127.0.0.1", 0, "client metrics")
    try:
        assert get(server, "/health") == (200, '{"status":"healthy","code":0}')
        assert get(server, "/health") == (503, '{"status":"unhealthy","code":2}')
    finally:
        server.close()


def test_a_busy_or_open_port_is_named_with_its_purpose(pages: HttpThread, cluster: FakeCluster) -> None:
    app = http_pages.admin_app(lambda: FakePool(cluster), FakePool(cluster).messengers, "")
    with pytest.raises(ConfigError, match=r"metrics.*in use"):
        HttpThread(app, "127.0.0.1", pages.port, "metrics")
    with pytest.raises(ConfigError, match=r"metrics.*without a secret"):
        HttpThread(app, "0.0.0.0", 0, "metrics")


def run(*program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moonpool.integrations.mooncake_api", *program]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60, check=False
    )


CHILD = (
    "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import mooncake.store as s; print(s.__file__)'])"
)


def test_a_program_and_its_children_find_the_stand_in(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"import sys, mooncake.store\nprint(sys.argv[1:], mooncake.__file__, flush=True)\n{CHILD}\n")
    done = run(str(script), "one", "--two")
    first, second = done.stdout.splitlines()
    assert first == f"['one', '--two'] {launch.SHIM / 'mooncake/__init__.py'}"
    assert second == str(launch.SHIM / "mooncake/store.py")
    assert run("-c", "import sys; sys.exit(7)").returncode == 7
    assert run("-m", "this").stdout.startswith("The Zen")


def test_commands_are_found_and_name_a_bad_flag() -> None:
    assert run("which", "mooncake_master").stdout.strip() == str(launch.BIN / "mooncake_master")
    done = run("mooncake_master", "--rpc_prot=1")
    assert (done.returncode, done.stderr) == (
        1,
        "mooncake_master: --rpc_prot: unknown flag. Did you mean --rpc_port?\n",
    )
    assert run("mooncake_client", "--version").stdout.startswith("mooncake_client (moonpool")
    assert run("no-such-program").returncode == 127


def test_the_environment_is_changed_once() -> None:
    first = launch.environment({"PATH": "/bin", "PYTHONPATH": "/mine"})
    assert launch.environment(first) == first
    assert first["PYTHONPATH"] == f"{launch.SHIM}:/mine"


def test_without_a_program_it_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "PROGRAM" in capsys.readouterr().err
