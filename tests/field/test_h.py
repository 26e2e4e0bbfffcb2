"""H: sizes at the edges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.errors import ObjectTooLarge
from moonpool.store.embedded import EmbeddedPool
from moonpool.testing.leaks import no_leaks
from moonpool.types import Put
from tests.cluster.test_many_messengers import Pool

MIB = 1 << 20


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with no_leaks():
        pool = Pool(tmp_path, count=2)
        yield pool
        pool.close()


@pytest.mark.parametrize("far", [False, True])
def test_what_is_larger_than_any_messenger_is_too_large_at_once_and_nothing_goes_for_it(pool: Pool, far: bool) -> None:
    """H-4: two segments of 8 MiB make no room for 12."""
    client = pool.client(0, far=far)
    client.put("k", b"k")
    [outcome] = client.batch_put(["large"], [bytes(12 * MIB)])
    assert isinstance(outcome, ObjectTooLarge)
    stats = client.stats()
    assert (stats.evictions, stats.writes_open) == (0, 0)
    assert client.get("k") == b"k"


@pytest.mark.parametrize("capacity", [1, 63, 64, 4095, 4096, 4097, 10 * MIB + 3])
def test_a_segment_has_any_size(capacity: int) -> None:
    """H-5: space is given out in units of 64 bytes; what is left of the last one is not used."""
    with no_leaks(), EmbeddedPool(capacity) as pool:
        most = capacity // 64 * 64
        [outcome] = pool.batch_put(["more"], [bytes(most + 1)])
        assert isinstance(outcome, ObjectTooLarge)
        assert pool.put("all", b"\x07" * most) is Put.STORED
        assert pool.get("all") == b"\x07" * most
