"""`make bench-conductor`."""

from __future__ import annotations

import argparse

from benchmarks import figures
from benchmarks.conductor import decision, proxy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=float, default=1e7)
    parser.add_argument("--only", choices=("decision", "proxy"))
    options = parser.parse_args()
    found: dict[str, float] = {}
    if options.only != "proxy":
        found |= decision.measure(int(options.blocks))
    if options.only != "decision":
        found |= proxy.measure()
    print(figures.write("bench-conductor", found))


if __name__ == "__main__":
    main()
