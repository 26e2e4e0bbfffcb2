"""The two pairs, each in both directions, and where their bundles and baselines lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moonpool import paths

Direction = Literal["l2s", "s2l"]


@dataclass(frozen=True)
class Pair:
    name: str
    """`bundled` or `qwen`."""
    direction: Direction
    source: str
    target: str
    fitted_by: str
    """The command that makes bundle and baselines."""

    @property
    def label(self) -> str:
        return f"{self.name}_{self.direction}"

    @property
    def folder(self) -> str:
        return f"{self.source}-to-{self.target}"

    @property
    def bundle(self) -> Path:
        return Path("bundles") / self.folder

    @property
    def baselines(self) -> dict[str, Path]:
        """Other maps, fitted on the same tokens, as far as they are there."""
        known = {"issue #1520 mlp": "issue1520", "ridge, one layer": "ridge1", "trunk, not distilled": "trunk"}
        places = {name: paths.cache_dir() / "fits" / f"{self.folder}-{label}" for name, label in known.items()}
        return {name: place for name, place in places.items() if place.is_dir()}

    def missing(self) -> str:
        """What keeps this pair from being measured, or nothing."""
        for model in (self.source, self.target):
            if not Path(paths.find_model(model)).is_dir():
                return f"no model `{model}` in MOONPOOL_MODELS"
        return "" if self.bundle.is_dir() else f"no bundle {self.bundle}: run `{self.fitted_by}` first"


def pairs() -> list[Pair]:
    moon = "moon-large", "moon-small"
    qwen = "qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct"
    return [
        Pair("bundled", "l2s", *moon, "make bundles"),
        Pair("bundled", "s2l", *moon[::-1], "make bundles"),
        Pair("qwen", "l2s", *qwen, "python -m recipes.qwen --direction l2s"),
        Pair("qwen", "s2l", *qwen[::-1], "python -m recipes.qwen --direction s2l"),
    ]
