"""Logs: text for people, or one JSON object a line for collectors. Standard library only.

An error of ours that is logged (as the exception, or as one of the message's arguments) brings its fields along, so that a log line
can be searched by key and says how to mend it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal, TextIO, TypeAlias

from moonpool.errors import MoonpoolError

Format: TypeAlias = Literal["text", "json"]
Level: TypeAlias = Literal["debug", "info", "warning", "error"]

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure(format: Format = "text", level: Level = "info", stream: TextIO | None = None) -> None:
    """Log from now on to `stream` (stderr), in place of what was configured before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class JsonFormatter(logging.Formatter):
    """time (UTC, ISO 8601, milliseconds), level, logger, message; of an error: error (its class), key, need, have, fix; exception
    (the traceback), where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, str] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        error = _error_in(record)
        if error:
            line["error"] = type(error).__name__
            line |= {name: text for name, text in error.fields().items() if text and name != "what"}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _error_in(record: logging.LogRecord) -> MoonpoolError | None:
    arguments = record.args if isinstance(record.args, tuple) else ()
    candidates = (record.exc_info[1] if record.exc_info else None, *arguments)
    return next((c for c in candidates if isinstance(c, MoonpoolError)), None)
