"""The C2C file: every mistake is an error that says where it is and how to mend it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.c2c.config import C2CConfig, C2CFile, check, load_c2c
from moonpool.config import parse
from moonpool.errors import ConfigError, ProtocolError

GOOD = """
models:
  a: {ref: folder-a}
  b: {ref: folder-b}
  c: {ref: folder-c}
rules:
  - {source: a, target: b, bundle: somewhere}
  - {source: a, target: c, bundle: elsewhere, mode: on_miss, serve: on_request}
"""


def read(text: str) -> C2CFile:
    file = parse(text.encode(), C2CFile, name="c2c.yaml")
    check(file, name="c2c.yaml")
    return file


def test_several_targets_for_one_source_are_fine() -> None:
    file = read(GOOD)
    assert [(r.source, r.target, r.mode) for r in file.rules] == [("a", "b", "on_put"), ("a", "c", "on_miss")]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("models:", "models: ["), "not valid YAML"),
        (("models:", "modles:"), "Did you mean `models`"),
        (("target: b,", "target: b, moed: on_put,"), "Did you mean `mode`"),
        (("mode: on_miss", "mode: on_mis"), r"Invalid enum value .on_mis."),
        (("target: b,", "target: nobody,"), "unknown model `nobody`"),
        (("target: c,", "target: b,"), "second rule for a → b"),
        (("target: b,", "target: a,"), "cyclic rules: a → a"),
        (("bundle: somewhere", "bundle: somewhere, digest: 12ab"), "32 hex digits"),
        (("bundle: somewhere", "bundle: somewhere, deadline_s: 0"), "deadline_s must be positive"),
        (("rules:", "page_size: 0\nrules:"), "page_size out of range"),
        (("rules:", "workers: 1000\nrules:"), "workers out of range"),
        (("rules:", "queue_pages: many\nrules:"), "Expected `int`"),
    ],
)
def test_mistakes_are_named(change: tuple[str, str], says: str) -> None:
    assert change[0] in GOOD
    with pytest.raises(ConfigError, match=says):
        read(GOOD.replace(*change, 1))


def test_a_cycle_is_refused_with_its_path_and_can_be_allowed() -> None:
    cyclic = GOOD + "  - {source: b, target: c, bundle: x}\n  - {source: c, target: a, bundle: x}\n"
    with pytest.raises(ConfigError, match="cyclic rules: a → b → c → a"):
        read(cyclic)
    read("allow_cycles: true\n" + cyclic)


def test_a_model_is_never_its_own_source_even_where_cycles_are_allowed() -> None:
    with pytest.raises(ConfigError, match="cyclic rules: a → a"):
        read("allow_cycles: true\n" + GOOD.replace("target: b,", "target: a,"))


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "c2c.yaml"
    path.write_bytes(b"models: \xff\xfe")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_c2c(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_c2c(tmp_path / "nowhere.yaml")


def test_no_config_is_the_config_without_rules() -> None:
    assert C2CConfig.decode(b"") == C2CConfig()
    with pytest.raises(ProtocolError):
        C2CConfig.decode(b"{")
