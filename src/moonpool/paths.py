"""Where Moonpool finds and keeps things on a machine. The only module that reads the environment.

MOONPOOL_MODELS   folder of model folders, searched by name        (default: none)
MOONPOOL_CACHE    downloaded bundles, weight digests, fits         (default: ~/.cache/moonpool)
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    return Path(os.environ.get("MOONPOOL_CACHE") or Path.home() / ".cache" / "moonpool")


def models_dir() -> Path | None:
    folder = os.environ.get("MOONPOOL_MODELS")
    return Path(folder) if folder else None


def repo_dir(name: str) -> Path | None:
    """A folder of the checkout (`models`, `bundles`) when Moonpool runs from one; None in an installed package."""
    folder = Path(__file__).resolve().parents[2] / name
    return folder if folder.is_dir() else None


def find_model(ref: str) -> str:
    """A model folder for `ref`: a path, a folder under MOONPOOL_MODELS or the checkout's models; else `ref` (a hub name)."""
    roots = [Path(), models_dir(), repo_dir("models")]
    return next((str(r / ref) for r in roots if r is not None and (r / ref / "config.json").is_file()), ref)
