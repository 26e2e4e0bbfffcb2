"""The files in `deploy/` say only what the command line knows, and what they claim holds."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from moonpool.config import to_bytes
from moonpool.ops import ports
from moonpool.ops.settings import (
    MASTER,
    MESSENGER,
    MasterSettings,
    MessengerSettings,
    Option,
    check_environment,
    resolve,
)

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


class Started(NamedTuple):
    """One start of `moonpool` in a manifest."""

    where: str
    arguments: list[str]
    environment: dict[str, str]


def containers() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, container and pod of each one in the Kubernetes manifests."""
    for file in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for document in map(msgspec.yaml.decode, file.read_text().split("\n---\n")):
            spec = (
                document["spec"] if document["kind"] == "Pod" else document["spec"].get("template", {}).get("spec", {})
            )
            for container in [*spec.get("initContainers", []), *spec.get("containers", [])]:
                yield f"{file.name}: {container['name']}", container, spec


def started() -> list[Started]:
    found = []
    for where, container, _ in containers():
        environment = {e["name"]: e.get("value", "from the pod") for e in container.get("env", [])}
        found.append(Started(where, container.get("args", []), environment))
    compose = msgspec.yaml.decode((DEPLOY / "docker" / "compose.yaml").read_text())
    found += [Started(f"compose.yaml: {n}", s["command"], {}) for n, s in compose["services"].items()]
    for unit in UNITS:
        text = unit.read_text().replace("%H", "host").replace("%i", "m0")
        [command] = re.findall(r"^ExecStart=\S+/moonpool (.*)$", text, re.MULTILINE)
        environment = dict(line.split("=", 1) for line in re.findall(r"^Environment=(.*)$", text, re.MULTILINE))
        found.append(Started(unit.name, shlex.split(command), environment))
    return found


def flags(arguments: list[str], options: tuple[Option, ...]) -> dict[str, object]:
    """As the command line reads them; a flag that it does not know is a KeyError."""
    by_flag = {o.flag: o for o in options}
    given: dict[str, object] = {}
    words = [w for a in arguments for w in a.split("=", 1)]
    while words:
        option = by_flag[words.pop(0)]
        switch = option.path in ("prefault", "disk.fsync", "security.tls_mutual")
        given[option.parameter] = True if switch else words.pop(0)
    return given


@pytest.mark.parametrize("start", started(), ids=lambda s: s.where)
def test_every_start_is_one_that_the_command_line_takes(start: Started) -> None:
    check_environment(start.environment)
    if not start.arguments:
        return
    command, *arguments = start.arguments
    if command == "master":
        master = resolve(MasterSettings, MASTER, None, start.environment, flags(arguments, MASTER))
        assert master.listen in ("", f"0.0.0.0:{ports.MASTER}")
        assert master.http.endswith(f":{ports.MASTER_HTTP}")
    else:
        assert command == "messenger"
        messenger = resolve(MessengerSettings, MESSENGER, None, start.environment, flags(arguments, MESSENGER))
        messenger.limits()
        assert messenger.master
        assert messenger.listen in ("", f"0.0.0.0:{ports.MESSENGER}")


def test_they_were_all_found() -> None:
    assert len([s for s in started() if s.arguments]) == 6


def test_kubernetes_limits_leave_room_for_the_segment_and_the_grace() -> None:
    found = 0
    for where, container, pod in containers():
        limit = to_bytes(container["resources"]["limits"]["memory"])
        options = flags(container.get("args", ["", ""])[1:], MESSENGER + MASTER) if "args" in container else {}
        if "capacity" in options:
            assert limit >= to_bytes(str(options["capacity"])) + (1 << 30), where
            assert options["prefault"], "or engines would be charged for its pages"
            assert float(str(options["grace"])) + 5 <= pod["terminationGracePeriodSeconds"]
            found += 1
    assert found == 1


def test_kubernetes_containers_run_as_nobody_special_and_see_no_service_links() -> None:
    for where, container, pod in containers():
        assert pod["enableServiceLinks"] is False, where
        if where.startswith("moonpool.yaml") and container["name"] != "own":
            assert pod["securityContext"]["runAsNonRoot"], where
            assert container["securityContext"]["readOnlyRootFilesystem"], where
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"], where
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys(), where


def test_kubernetes_engines_and_messengers_share_the_socket_folder_at_the_same_path() -> None:
    mounts = {}
    for where, container, pod in containers():
        volumes = {v["name"]: v for v in pod.get("volumes", [])}
        for mount in container.get("volumeMounts", []):
            if "hostPath" in volumes[mount["name"]] and mount["name"] == "run":
                mounts[where] = (volumes[mount["name"]]["hostPath"]["path"], mount["mountPath"])
    assert len(mounts) == 3
    assert set(mounts.values()) == {("/run/moonpool", "/run/moonpool")}


def test_kubernetes_ports_and_probes_are_those_of_the_options() -> None:
    for where, container, _ in containers():
        named = {p["name"]: p["containerPort"] for p in container.get("ports", [])}
        if named:
            expected = (
                (ports.MASTER, ports.MASTER_HTTP) if "master" in where else (ports.MESSENGER, ports.MESSENGER_HTTP)
            )
            assert (named["rpc"], named["http"]) == expected


@pytest.mark.parametrize("unit", UNITS, ids=lambda u: u.name)
def test_systemd_units_are_sound(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    copy = tmp_path / unit.name.replace("@", "@m0")
    copy.write_text(unit.read_text().replace("/opt/moonpool/bin/moonpool", sys.executable))
    ran = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(copy)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    complaints = [line for line in ran.stderr.splitlines() if copy.name in line]
    assert complaints == []
    assert ran.returncode == 0, ran.stderr


IMPORTS = """
import sys
import moonpool.cli, moonpool.ops.serving, moonpool.ops.top, moonpool.ops.tables, moonpool.ops.emptying
import moonpool.store.client, moonpool.store.metadata.server
print(*{name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names)
"""
BY_OTHERS = {"annotated_doc", "anyio", "click", "h11", "idna", "shellingham", "typing_extensions", "yaml"}
"""What the packages in the Dockerfile need themselves."""


def test_the_image_installs_what_the_pools_processes_import_and_no_more() -> None:
    installed = re.findall(r'"([a-z-]+)(?:\[\w+\])?>=', (DEPLOY / "docker" / "Dockerfile").read_text())
    ran = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60, check=True)
    imported = {n for n in ran.stdout.split() if not n.startswith("_")} - {"moonpool"} - BY_OTHERS
    assert imported == {n.replace("-", "_") for n in installed}


def test_the_images_versions_are_those_of_the_package() -> None:
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    for requirement in re.findall(r'"([a-z-]+(?:\[\w+\])?>=[0-9.]+)"', (DEPLOY / "docker" / "Dockerfile").read_text()):
        assert f'"{requirement}"' in project
