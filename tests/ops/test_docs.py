"""`docs/operations.md` says what the code does."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from prometheus_client.core import Metric

from moonpool.c2c.commands import app as c2c_app
from moonpool.c2c.converter import Converter
from moonpool.cli import engine, pool
from moonpool.cli.settings import default_of, field_of
from moonpool.config import to_bytes
from moonpool.engine.metrics import EngineMetrics
from moonpool.integrations.mooncake_api.commands import client, master
from moonpool.metrics import ConverterMetrics, MasterMetrics, MessengerMetrics
from moonpool.ops import ports
from moonpool.ops.metered import Metered
from moonpool.ops.settings import MASTER, MESSENGER, MasterSettings, MessengerSettings, Option
from moonpool.store.embedded import EmbeddedPool
from moonpool.store.metadata.server import run_metadata
from moonpool.system import ServerSection
from tests.c2c.pairs import config, model, rule
from tests.ops.support import small_pool

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "operations.md").read_text()


def rows(head: str) -> list[list[str]]:
    """Cells of the table's rows whose head begins so."""
    found = re.search(rf"^\| {re.escape(head)}.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    assert found, head
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in found[1].splitlines()]


def option_rows() -> dict[str, tuple[str, str]]:
    """Path in the file and default, by flag, of all three tables."""
    pattern = r"^\| `(--[a-z0-9-]+)` \| `([\w.]+)` \| ([^|]*) \|"
    return {flag: (path, default.strip()) for flag, path, default in re.findall(pattern, TEXT, re.MULTILINE)}


@pytest.mark.parametrize(("kind", "options"), [(MasterSettings, MASTER), (MessengerSettings, MESSENGER)])
def test_i7_documented_defaults_are_those_of_the_code(kind: type[msgspec.Struct], options: tuple[Option, ...]) -> None:
    documented = option_rows()
    for option in options:
        path, default = documented[option.flag]
        assert path == option.path
        assert same(default, default_of(field_of(kind, option.path))), option.flag


def same(text: str, value: Any) -> bool:
    if isinstance(value, bool):
        return text == ("yes" if value else "no")
    if value in (None, "", {}):
        return text == "–" or text.startswith("must be given")
    return to_bytes(text) == value if isinstance(value, int) else text == str(value)


def test_no_option_is_documented_that_is_not_there() -> None:
    assert option_rows().keys() == {o.flag for o in (*MASTER, *MESSENGER)}


def test_the_ports_table_is_that_of_the_code() -> None:
    documented = [int(row[-1]) for row in rows("what | option")]
    assert documented == [
        ports.MASTER,
        ports.MESSENGER,
        ports.MASTER_HTTP,
        ports.MESSENGER_HTTP,
        ports.METADATA,
        ports.ENGINE,
        ports.CONDUCTOR,
    ]


def test_default_ports_are_the_same_wherever_they_stand() -> None:
    assert inspect.signature(run_metadata).parameters["port"].default == ports.METADATA
    assert inspect.signature(pool.metadata).parameters["port"].default == ports.METADATA
    assert inspect.signature(engine.serve).parameters["port"].default == ports.ENGINE
    assert ServerSection().port == ports.ENGINE


def test_j2_default_ports_are_pairwise_different() -> None:
    ours = [v for n, v in vars(ports).items() if n.isupper()]
    peers = [
        master.DEFAULT_PORT,
        master.FLAGS["metrics_port"].default,
        client.FLAGS["port"].default,
        client.FLAGS["http_port"].default,
    ]
    assert len({*ours, *peers}) == len(ours) + len(peers) == 11
    # One protocol, one port: Moonpool's metadata server answers at the peer's.
    assert master.FLAGS["http_metadata_server_port"].default == ports.METADATA


def test_the_metrics_list_is_that_of_the_code(tmp_path: Path) -> None:
    documented = {row[0]: row[1] for row in rows("metric")}
    with small_pool(tmp_path, messengers=1) as small:
        families: list[Metric] = []
        for collector in (MessengerMetrics(small.hosts[0]), MasterMetrics(small.service), Metered(small.service)):
            families += collector.collect()
    code = {f"`{f.name}{'_total' if f.type == 'counter' else ''}`": f.documentation for f in families}
    assert documented == code


def test_the_metrics_of_engine_and_converter_are_those_of_the_code() -> None:
    documented = {row[0].strip("`") for head in ("engine's metric", "converter's metric") for row in rows(head)}
    with EmbeddedPool(1 << 20) as pool:
        converter = ConverterMetrics(Converter(pool, config(rule(model("a"), model("b")))))  # not started: no thread
        text = EngineMetrics({}, (converter,)).text().decode()
    assert documented == set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))


def test_what_is_said_of_single_metrics_is_of_such_as_there_are() -> None:
    listed = {row[0].strip("`") for head in ("metric", "engine's metric", "converter's metric") for row in rows(head)}
    assert set(re.findall(r"\bmoonpool_\w+[a-z]\b(?!_)", TEXT)) <= listed


def test_the_commands_for_conversion_rules_and_bundles_are_those_of_the_code() -> None:
    documented = {re.findall(r"`moonpool c2c ([\w-]+)", row[0])[0] for row in rows("c2c command")}
    assert documented == set(typer.main.get_group(c2c_app).commands)


def test_every_row_of_the_failure_table_names_tests_that_exist() -> None:
    tests = "\n".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py"))
    found = rows("what | what users see")
    assert len(found) > 15
    for row in found:
        named = re.findall(r"`(test_\w+)`", row[-1])
        assert named, row[0]
        for name in named:
            assert f"def {name}(" in tests, name


def test_files_that_it_names_are_there() -> None:
    for name in re.findall(r"`((?:deploy|tests|docs)/[\w./-]+)`", TEXT):
        assert (ROOT / name).exists(), name
