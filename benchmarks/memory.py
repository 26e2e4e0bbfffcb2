"""What an object costs beside its bytes: memory of the messenger and of the master a key. `python -m benchmarks.memory [KEYS]`."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import figures
from moonpool.testing.cluster import LocalCluster

_KEY = "{:032x}/{:08d}/{:016x}"
"""58 characters, as long as a page's key."""
_BATCH = 4096


def anonymous(pid: int) -> int:
    """A process's own bytes; the segment, which is shared, is not among them."""
    fields = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in fields if line.startswith("Anonymous:"))


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300_000
    with LocalCluster(messengers=1, capacity=max(64 << 20, 2 * 64 * count)) as cluster:
        pids = {"messenger": cluster.messengers[0].pid, "master": cluster.master.pid}
        before = {name: anonymous(pid) for name, pid in pids.items()}
        pool = cluster.client()
        for start in range(0, count, _BATCH):
            keys = [_KEY.format(7, i, i) for i in range(start, min(count, start + _BATCH))]
            pool.batch_put(keys, [b"x" * 64] * len(keys))
        assert cluster.located(_KEY.format(7, count - 1, count - 1))
        rows = [(name, f"{(anonymous(pid) - before[name]) / count:,.0f} B") for name, pid in pids.items()]
    figures.show(f"{count:,} objects of 64 B, keys of 58 characters", rows, ("process", "memory a key"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
