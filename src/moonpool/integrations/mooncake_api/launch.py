"""Where the stand-in `mooncake` package and its console scripts lie, and an environment that finds them first."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_HERE = Path(__file__).resolve().parent
SHIM = _HERE / "shim"
"""Folder for PYTHONPATH: `import mooncake.store` is answered from here."""
BIN = _HERE / "bin"
"""Folder for PATH: `mooncake_master`, `mooncake_client`, `mooncake_http_metadata_server`."""
PYTHON = "MOONPOOL_PYTHON"
"""Environment variable: the interpreter that the console scripts run with."""


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the stand-in ahead of everything, for a program and for the processes that it starts."""
    return {
        **base,
        "PYTHONPATH": _first(SHIM, base.get("PYTHONPATH", "")),
        "PATH": _first(BIN, base.get("PATH", os.defpath)),
        PYTHON: sys.executable,
    }


def _first(folder: Path, rest: str) -> str:
    return os.pathsep.join([str(folder), *(p for p in rest.split(os.pathsep) if p and p != str(folder))])


def command(program: Sequence[str]) -> list[str]:
    """The command for PROGRAM ARGS...: a script (`.py`), `-m MODULE` or `-c CODE` for this interpreter, else an executable."""
    if program[0] in ("-m", "-c") or program[0].endswith(".py"):
        return [sys.executable, *program]
    return list(program)
