"""Settings come from a file, the environment and flags, through one loader with one set of errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from moonpool import config
from moonpool.cli.settings import field_of
from moonpool.errors import ConfigError, MoonpoolError
from moonpool.ops.settings import (
    MASTER,
    MESSENGER,
    MasterSettings,
    MessengerSettings,
    Option,
    check_environment,
    resolve,
    shown,
    variables,
)

ROOT = Path(__file__).parents[2]


def option(path: str) -> Option:
    return next(o for o in (*MESSENGER, *MASTER) if o.path == path)


def messenger(tmp_path: Path, source: str, path: str, value: str) -> MessengerSettings:
    """With this value from this source, and all that must be given from the environment."""
    environment = {"MOONPOOL_SOCKET": "/run/m0"}
    file: Path | None = None
    flags: dict[str, object] = {}
    if source == "file":
        head, _, rest = path.partition(".")
        file = tmp_path / "messenger.yaml"
        file.write_text(f"{head}: {{{rest}: {value}}}" if rest else f"{head}: {value}")
    elif source == "environment":
        environment[option(path).variable] = value
    else:
        flags[option(path).parameter] = value
    settings = resolve(MessengerSettings, MESSENGER, file, environment, flags)
    settings.limits()
    return settings


@pytest.mark.parametrize("source", ["file", "environment", "flag"])
@pytest.mark.parametrize(
    ("path", "value", "got"),
    [("capacity", "64MiB", 64 << 20), ("capacity", "4096", 4096), ("grace_s", "2.5", 2.5), ("name", "a", "a")],
)
def test_a_good_value_is_the_same_from_everywhere(
    tmp_path: Path, source: str, path: str, value: str, got: object
) -> None:
    assert getattr(messenger(tmp_path, source, path, value), path) == got


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("capacity", "4 elephants"),
        ("capacity", "-1"),
        ("grace_s", "ten"),
        ("grace_s", "-1"),
        ("high_watermark", "2"),
        ("max_objects", "0"),
        ("log_level", "loud"),
        ("disk.folder", "/disk"),  # without its capacity
        ("security.tls_mutual", "perhaps"),
    ],
)
def test_i3_the_same_bad_value_gives_the_same_error_from_everywhere(tmp_path: Path, path: str, value: str) -> None:
    errors = []
    for source in ("file", "environment", "flag"):
        with pytest.raises(MoonpoolError) as caught:
            messenger(tmp_path, source, path, value)
        errors.append((type(caught.value), caught.value.what, caught.value.need, caught.value.have, caught.value.fix))
    assert errors[0][0] is ConfigError
    assert errors[0] == errors[1] == errors[2]


def test_the_error_names_where_the_bad_value_stands(tmp_path: Path) -> None:
    for source, name in (("environment", "MOONPOOL_GRACE"), ("flag", "--grace"), ("file", "messenger.yaml")):
        with pytest.raises(ConfigError, match="grace_s: Expected `float`") as caught:
            messenger(tmp_path, source, "grace_s", "ten")
        assert caught.value.key.endswith(name)


def test_flags_go_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("{socket: f, name: f, master: f, disk: {folder: f, capacity: 1GiB}}")
    environment = {"MOONPOOL_NAME": "e", "MOONPOOL_MASTER": "e", "MOONPOOL_DISK": "e"}
    got = resolve(MessengerSettings, MESSENGER, file, environment, {"master": "g", "disk_capacity": None})
    assert (got.socket, got.name, got.master) == ("f", "e", "g")
    assert got.disk is not None
    assert (got.disk.folder, got.disk.capacity) == ("e", 1 << 30)


def test_quotas_from_a_flag_are_those_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("{socket: s, quotas: {a: 1GiB, b.c: 5}}")
    by_file = resolve(MasterSettings, MASTER, file, {}, {})
    by_flag = resolve(MasterSettings, MASTER, None, {}, {"socket": "s", "quota": "a=1GiB,b.c=5"})
    assert by_file == by_flag
    assert by_flag.quotas == {"a": 1 << 30, "b.c": 5}


def test_i1_an_unknown_key_names_the_nearest_known_one(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("{socket: s, capacityy: 5}")
    with pytest.raises(ConfigError, match="Did you mean `capacity`"):
        resolve(MessengerSettings, MESSENGER, file, {}, {})


@pytest.mark.parametrize(
    ("name", "nearest"), [("MOONPOOL_CAPACTY", "CAPACITY"), ("MOONPOOL_SECRETFILE", "SECRET_FILE")]
)
def test_i2_an_unknown_variable_names_the_nearest_known_one(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*Did you mean MOONPOOL_{nearest}\\?"):
        check_environment({"PATH": "", name: "1"})


def test_what_kubernetes_adds_for_a_service_is_no_setting() -> None:
    check_environment(
        {
            "MOONPOOL_MASTER_SERVICE_HOST": "10.0.0.1",
            "MOONPOOL_MASTER_SERVICE_PORT": "7700",
            "MOONPOOL_MASTER_SERVICE_PORT_RPC": "7700",
            "MOONPOOL_MASTER_PORT": "tcp://10.0.0.1:7700",
            "MOONPOOL_MASTER_PORT_7700_TCP": "tcp://10.0.0.1:7700",
            "MOONPOOL_MASTER_PORT_7700_TCP_ADDR": "10.0.0.1",
        }
    )


def test_every_variable_that_the_code_reads_is_known() -> None:
    read = set()
    for folder in ("src", "benchmarks", "deploy"):
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and file.suffix in (".py", ".yaml", ".service", ".env"):
                read.update(re.findall(r"MOONPOOL_[A-Z0-9_]*[A-Z0-9]", file.read_text()))
    assert "MOONPOOL_SECRET_FILE" in read
    assert read <= set(variables())


@pytest.mark.parametrize("missing", ["environment", "flag"])
def test_a_missing_setting_says_all_ways_to_give_it(missing: str) -> None:
    with pytest.raises(ConfigError, match=r"Give --socket, MOONPOOL_SOCKET, or `socket` in the file"):
        resolve(MasterSettings, MASTER, None, {}, {})
    with pytest.raises(ConfigError, match=r"Give --disk-capacity, MOONPOOL_DISK_CAPACITY"):
        resolve(MessengerSettings, MESSENGER, None, {"MOONPOOL_SOCKET": "s", "MOONPOOL_DISK": "d"}, {})


@pytest.mark.parametrize(("kind", "options"), [(MasterSettings, MASTER), (MessengerSettings, MESSENGER)])
def test_every_setting_has_a_flag_and_a_variable_and_nothing_else_has(
    kind: type[msgspec.Struct], options: tuple[Option, ...]
) -> None:
    assert {o.path for o in options} == set(_paths(kind))
    assert len({o.flag for o in options}) == len(options)


def _paths(kind: type[msgspec.Struct]) -> list[str]:
    found = []
    for field in msgspec.structs.fields(kind):
        below = [t for t in (field.type, *getattr(field.type, "__args__", ())) if isinstance(t, type)]
        inner = next((t for t in below if issubclass(t, msgspec.Struct)), None)
        found += [f"{field.name}.{p}" for p in _paths(inner)] if inner else [field.name]
        assert inner or field_of(kind, field.name).name == field.name
    return found


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("5", 5),
        ("5 B", 5),
        ("1KiB", 1024),
        ("2gib", 2 << 30),
        ("1.5MiB", 3 << 19),
        ("4Gi", 4 << 30),
        ("1GB", 10**9),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert config.to_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1 2", "0x10", "1e3", "-1", "1XiB", "NaN"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        config.to_bytes(text)


def test_the_effective_settings_are_one_line_of_json() -> None:
    line = shown(resolve(MasterSettings, MASTER, None, {"MOONPOOL_SECRET_FILE": "/secret"}, {"socket": "s"}))
    assert "\n" not in line
    assert json.loads(line)["security"]["secret_file"] == "/secret"
