"""The real package in an environment of its own, so that nothing of it comes near ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path("build/peer-venv")
PACKAGE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
NEEDS = (PACKAGE, "numpy")
_TRY = "import numpy, mooncake.store, pathlib; print(pathlib.Path(mooncake.store.__file__).parent)"


class Unavailable(Exception):
    """The peer cannot be had here; the text says why."""


def ensure() -> Path:
    """A Python that can import the peer: that of MOONPOOL_PEER_PYTHON, or one that is made now. Raises Unavailable."""
    given = os.environ.get("MOONPOOL_PEER_PYTHON")
    python = Path(given) if given else FOLDER.absolute() / "bin" / "python"
    if not given and not (FOLDER / "installed").exists():
        _run([sys.executable, "-m", "venv", str(FOLDER)])
        _run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *NEEDS])
        (FOLDER / "installed").touch()
    binaries(python)
    return python


def binaries(python: Path) -> Path:
    """The folder with the peer's executables. Raises Unavailable if it cannot be imported (it needs libibverbs.so.1)."""
    return Path(_run([str(python), "-c", _TRY]).strip().splitlines()[-1])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise Unavailable(f"{command[0]}: {e}") from e
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(f"{' '.join(command[:4])}: {last[-1] if last else done.returncode}")
    return done.stdout
