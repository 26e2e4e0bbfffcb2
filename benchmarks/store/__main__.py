"""Moonpool beside the real Mooncake Store: `make bench-store`, or `python -m benchmarks.store --help`.

Both sides run in this one run, their rounds alternate, and each figure is a ratio of medians: ours ÷ theirs in speed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import figures
from benchmarks.store import index, network, peer_venv, recovery, speed, tcp
from benchmarks.store.plan import Plan

SECTIONS: dict[str, Callable[[Plan], dict[str, object]]] = {
    "two": speed.two_processes,
    "one": speed.one_process,
    "exist": speed.existence,
    "view": speed.views,
    "index": index.index,
    "recovery": recovery.recovery,
    "tcp": tcp.tcp,
}


def main() -> int:
    options = _options()
    if not network.inside():
        try:
            python = peer_venv.ensure()
        except peer_venv.Unavailable as e:
            print(f"the peer's side is skipped: {e}")
            python = Path()
        peer = ["--peer-python", str(python)] if python.name else []
        return network.enter("benchmarks.store", [*sys.argv[1:], *peer], boost=options.boost)
    network.begin(boost=options.boost)
    plan = Plan(
        peer=Path(options.peer_python) if options.peer_python else None,
        rounds=options.rounds or (2 if options.quick else 7),
        quick=options.quick,
        keys=options.keys or (20_000 if options.quick else 1_000_000),
        slow=options.slow,
    )
    found: dict[str, object] = {}
    for name in options.only or SECTIONS:
        start = time.monotonic()
        found |= SECTIONS[name](plan)
        print(f"[{name}: {time.monotonic() - start:.0f} s]\n", flush=True)
    if options.only:
        print("a part only: no figures written")
    else:
        print(figures.write("bench-store-quick" if options.quick else "bench-store", found))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=SECTIONS, help="these sections only; writes no figures")
    parser.add_argument("--quick", action="store_true", help="few and small rounds: shows that it works, not how fast")
    parser.add_argument(
        "--slow", action="store_true", help="also what takes minutes (the peer's set-up without a master)"
    )
    parser.add_argument("--boost", action="store_true", help="run ahead of other work on this machine (root)")
    parser.add_argument("--rounds", type=int, help="rounds that are counted (7)")
    parser.add_argument("--keys", type=int, help="keys of the index section (1000000)")
    parser.add_argument("--peer-python", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
