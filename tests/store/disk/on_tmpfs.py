"""Run by `test_full_disk` in a mount namespace of its own, on a tmpfs of 16 MiB: `python -m tests.store.disk.on_tmpfs FOLDER`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from moonpool.store.messenger.disk import OsFiles
from tests.store.disk.support import MIB, get, open_tier, pattern, put

QUOTA = 8 * MIB


class Watching(OsFiles):
    """Looks at the file system after each call that takes space."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.most = 0

    def look(self) -> None:
        self.most = max(self.most, used(self.root))

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        done = super().write(fd, buffers, offset)
        self.look()
        return done


def used(root: Path) -> int:
    space = os.statvfs(root)
    return (space.f_blocks - space.f_bfree) * space.f_frsize


def main(root: Path) -> None:
    assert used(root) == 0
    files = Watching(root)
    tier = open_tier(root, QUOTA, files=files)
    for i in range(100):
        assert put(tier, f"k{i}", pattern(f"k{i}", MIB)), tier.stats()
    assert QUOTA - 2 * MIB < files.most <= QUOTA, files.most
    held = tier.keys()

    filler = root / "0" / "somebody-elses"
    with filler.open("wb", buffering=0) as f:
        try:
            while True:
                f.write(bytes(4096))
        except OSError:
            pass  # the disk is full
    tier.remove(held[0])
    with filler.open("ab", buffering=0) as f:
        f.write(bytes(MIB - 65536))  # takes most of what came free
    assert not put(tier, "new", pattern("new", MIB))
    assert tier.stats().failures == {"ENOSPC": 1}
    assert all(get(tier, k) == pattern(k, MIB) for k in held[1:]), "reads go on"
    filler.unlink()
    assert put(tier, "new", pattern("new", MIB))
    tier.check_integrity()
    tier.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    print("held")
