"""Logs as JSON lines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from moonpool import telemetry
from moonpool.errors import NoSpace


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_is_one_object_with_time_level_logger_and_message(stream: io.StringIO) -> None:
    telemetry.configure("json", "info", stream)
    logging.getLogger("moonpool.x").info("two\nlines of %s", "text")
    logging.getLogger("moonpool.x").debug("not this")
    [line] = stream.getvalue().splitlines()
    said = json.loads(line)
    assert said.pop("time")[10:11] == "T"
    assert said == {"level": "info", "logger": "moonpool.x", "message": "two\nlines of text"}


def test_an_error_brings_its_fields(stream: io.StringIO) -> None:
    telemetry.configure("json", "info", stream)
    error = NoSpace("no room", key="k1", need="5 B", have="3 B", fix="Wait.")
    logging.getLogger("moonpool").warning("put failed: %s", error)
    try:
        raise error
    except NoSpace:
        logging.getLogger("moonpool").exception("again")
    first, second = map(json.loads, stream.getvalue().splitlines())
    fields = {"error": "NoSpace", "key": "k1", "need": "5 B", "have": "3 B", "fix": "Wait."}
    assert fields.items() <= first.items()
    assert fields.items() <= second.items()
    assert "Traceback" in second["exception"]


def test_text_is_for_people(stream: io.StringIO) -> None:
    telemetry.configure("text", "warning", stream)
    logging.getLogger("moonpool.x").info("quiet")
    logging.getLogger("moonpool.x").warning("loud")
    assert stream.getvalue().endswith("WARNING moonpool.x: loud\n")
    assert "quiet" not in stream.getvalue()


def test_configuring_twice_does_not_say_things_twice(stream: io.StringIO) -> None:
    telemetry.configure("text", "info", stream)
    telemetry.configure("json", "info", stream)
    logging.getLogger("moonpool.x").info("once")
    assert len(stream.getvalue().splitlines()) == 1
