"""Random kill -9, SIGSTOP and restarts of everything while everything works: `python -m benchmarks.faults [--faults N] [--seed S]`.

Real processes: a master, three messengers (one with a disk tier), clients and writers near (shared memory) and far (TCP). Whatever
is read is checked, all the time. In the end nothing wrong may have been read, and nothing may be left: no open handle, no byte
without an object, no key that cannot be put, no descriptor, thread or mapping.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import figures
from benchmarks.faults.storm import Outcome, run


def main() -> int:
    parser = argparse.ArgumentParser(description="Random faults under load")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=None, help="copy the processes' logs and findings here")
    options = parser.parse_args()
    found = run(options.faults, options.seed, keep=options.keep)
    report(found)
    print(figures.write("faults", found.figures()))
    return 1 if found.bad() else 0


def report(found: Outcome) -> None:
    figures.show(
        f"{found.faults} faults, seed {found.seed}",
        [
            ("seconds", f"{found.seconds:.0f}"),
            ("operations", str(found.operations)),
            *[(f"  {kind}", str(count)) for kind, count in sorted(found.kinds.items())],
            *[(f"refused: {kind}", str(count)) for kind, count in found.refusals.most_common()],
            *[(name, str(len(findings))) for name, findings in found.findings.items()],
            ("leaked pins", str(found.leaked_pins)),
        ],
        ("", ""),
    )
    for name, findings in found.findings.items():
        for finding in findings[:20]:
            print(f"{name}: {finding}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
