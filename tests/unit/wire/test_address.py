"""Socket paths."""

from __future__ import annotations

import pytest

from moonpool.errors import ConfigError
from moonpool.wire.address import parse


def test_paths() -> None:
    assert parse("/run/m.sock") == parse("unix:/run/m.sock") == "/run/m.sock"
    assert parse("m.sock") == "m.sock"
    assert parse("./localhost:80") == "./localhost:80"


@pytest.mark.parametrize(
    "text", ["", "unix:", "localhost:8000", "127.0.0.1:1", "a\0b", "/" + "x" * 107, "/" + "é" * 54]
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text)
