"""The tier against a dict, with restarts and with damage done behind its back."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.store.disk.support import Model, open_tier, pattern, record_paths, taken_on_disk, temporary_paths

FIXED = 19 * 4096
CAPACITY = FIXED + 40_000
KEYS = [f"key{i}" for i in range(6)]
keys = st.sampled_from(KEYS)
sizes = st.sampled_from([0, 1, 4000, 4096 - 64 - 4, 4096 - 64 - 3, 5000, 9000, 20_000, 40_000])


class Tier(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="moonpool-disk-"))
        self.model = Model(open_tier(self.folder, CAPACITY))
        self.version = 0
        self.harmed: set[Path] = set()
        """Files that are not as the tier left them."""

    @rule(key=keys, size=sizes)
    def write(self, key: str, size: int) -> None:
        before = set(self.model.tier.keys()) - {key}
        free = CAPACITY - self.model.tier.stats().bytes
        need = -(-(64 + len(key) + size) // 4096) * 4096 + 256
        self.version += 1
        value = pattern(key, size, self.version)
        stored = self.model.write(key, value)
        assert stored == (FIXED + need <= CAPACITY)
        assert not stored or self.model.read(key) == value
        if need <= free or not stored:
            assert before <= set(self.model.tier.keys()), "evicted without need"

    @rule(key=keys)
    def read(self, key: str) -> None:
        there = key in self.model.tier
        value = self.model.read(key)
        assert there or value is None
        assert value is not None or key not in self.model.tier
        assert value is not None or not there or self.harmed, "an unharmed object was lost"

    @rule(wanted=st.lists(keys, max_size=4))
    def remove(self, wanted: list[str]) -> None:
        self.model.remove(wanted)
        assert not set(wanted) & set(self.model.tier.keys())

    @rule()
    def restart(self) -> None:
        before = set(self.model.tier.keys())
        self.model.tier.close()
        self.model.tier = open_tier(self.folder, CAPACITY)
        after = set(self.model.tier.keys())
        assert after == before if not self.harmed else after <= before
        assert self.model.tier.stats().bytes == taken_on_disk(self.folder)
        self.harmed &= set(record_paths(self.folder))

    @rule(which=st.integers(0, 100), at=st.integers(0, 10_000), kind=st.sampled_from(["flip", "truncate", "delete"]))
    def harm(self, which: int, at: int, kind: str) -> None:
        # Records of one tick of the file system's clock are evicted in no certain order after a restart, so what there is must not
        # decide what is drawn.
        paths = sorted(record_paths(self.folder))
        if not paths:
            return
        path = paths[which % len(paths)]
        raw = bytearray(path.read_bytes())
        self.harmed.add(path)
        if kind == "delete" or not raw:
            path.unlink()
            return
        at %= len(raw)
        raw[at] ^= 1
        path.write_bytes(raw if kind == "flip" else raw[:at])

    @invariant()
    def books_balance(self) -> None:
        stats = self.model.tier.stats()
        assert stats.bytes <= CAPACITY
        assert stats.objects == len(self.model.tier.keys())
        assert stats.left_behind == stats.write_failures - stats.failures.get("too large", 0) == 0
        assert temporary_paths(self.folder) == []
        if not self.harmed:
            assert stats.bytes == taken_on_disk(self.folder)
        self.model.tier.check_integrity()

    def teardown(self) -> None:
        self.model.check()
        self.model.tier.close()
        shutil.rmtree(self.folder)


Tier.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTier = Tier.TestCase
