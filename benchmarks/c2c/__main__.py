"""`make bench-c2c`: the figures of conversion, speed and quality, of both pairs in both directions."""

from __future__ import annotations

import argparse

import torch

from benchmarks import figures, speculate
from benchmarks.c2c import quality, speed
from benchmarks.c2c.pairs import Pair, pairs
from moonpool import paths


def main() -> None:
    options = _parse()
    found: dict[str, float] = {}
    for pair in pairs():
        if options.only and options.only not in (pair.name, pair.label):
            continue
        if missing := pair.missing():
            print(f"{pair.label}: skipped, {missing}")
            continue
        if not options.speed_only:
            found |= quality.measure(pair, options.documents)
        if pair.label == "bundled_l2s" and not options.speed_only:
            found["gate_rejects_damaged"] = quality.gate_rejects_damaged(pair)
        if pair.direction == "l2s" and not options.quality_only:
            found |= _fast(pair)
        print(figures.write("bench-c2c", found))


def _fast(pair: Pair) -> dict[str, float]:
    """Speed of conversion, and of decoding with the target as the source's draft (the bundled pair's under the issue's names)."""
    measured = speed.measure(pair)
    rows = [(figure, f"{value:.3f}") for figure, value in measured.items()]
    figures.show(f"{pair.source} → {pair.target}", rows, ("figure", "value"))
    drafted = speculate.measure(paths.find_model(pair.source), paths.find_model(pair.target), str(pair.bundle))
    named = {f"{pair.name}_{n}": v for n, v in {**measured, **drafted}.items()}
    return named | (drafted if pair.name == "bundled" else {})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="bundled, qwen, bundled_l2s, …")
    parser.add_argument("--documents", type=int, default=12, help="held-out documents of each kind of the real pair")
    parser.add_argument("--speed-only", action="store_true")
    parser.add_argument("--quality-only", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
