"""Rounds that alternate between the sides, and what is made of them: medians with their range, ratios, rows of a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Measure = Callable[[int], Mapping[str, float]]
"""One round (its number is given) of one side: values by name."""


@dataclass
class Samples:
    """What all rounds of one side gave, by name."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, found: Mapping[str, float]) -> None:
        for name, value in found.items():
            self.values.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.values[name])

    def text(self, name: str, digits: int = 2) -> str:
        """`median (least–most)`."""
        low, high = min(self.values[name]), max(self.values[name])
        return f"{self.median(name):.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def alternate(sides: Mapping[str, Measure], rounds: int) -> dict[str, Samples]:
    """`rounds` rounds, in each every side once, after one that is not counted: no side has the quieter time of the machine."""
    samples = {name: Samples() for name in sides}
    for number in range(rounds + 1):
        for name, measure in sides.items():
            found = measure(number)
            if number:
                samples[name].add(found)
    return samples


def faster(ours: Samples, theirs: Samples, name: str) -> float:
    """Ratio of rates: how many times as fast we are."""
    return ours.median(name) / theirs.median(name)


def sooner(ours: Samples, theirs: Samples, name: str) -> float:
    """Ratio of times, turned round: how many times as fast we are."""
    return theirs.median(name) / ours.median(name)
