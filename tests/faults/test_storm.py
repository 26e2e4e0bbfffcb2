"""The fault benchmark in its short form: random kills and freezes of everything, and nothing wrong, leaked or stuck after it."""

from __future__ import annotations

import pytest
from benchmarks.faults.storm import run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_a_short_storm_leaves_nothing_wrong_leaked_or_stuck() -> None:
    found = run(faults=12, seed=7)
    assert not found.bad(), (found.findings, found.leaked_pins)
    assert found.operations, "the storm hit a pool at rest"
