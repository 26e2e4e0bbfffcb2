"""G: partial batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.errors import ObjectTooLarge
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.types import Pin, Put, PutOptions
from tests.cluster.test_many_messengers import Pool
from tests.field.support import KIB, MIB, SESSION, put, state_of


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with no_leaks():
        pool = Pool(tmp_path, count=2)
        yield pool
        pool.close()


def test_what_goes_to_another_messenger_keeps_its_place_in_the_results(pool: Pool) -> None:
    """G2: the home refuses elements 2 and 5 of 8, which go elsewhere, and 6, which nobody takes."""
    client = pool.client(0)
    for i in range(7):  # the home is nearly full of what cannot go
        client.put(f"fill{i}", bytes(MIB), PutOptions(pin=Pin.HARD, preferred=("m0",)))
    assert eventually(lambda: next(i for i in client.messengers() if i.name == "m0").used >= 7 * MIB)
    sizes = [KIB, KIB, 3 * MIB, KIB, KIB, 2 * MIB, 9 * MIB, KIB]
    keys = [f"k{i}" for i in range(8)]
    values = [bytes([i]) * size for i, size in enumerate(sizes)]
    outcomes = client.batch_put(keys, values, PutOptions(preferred=("m0",)))
    assert isinstance(outcomes[6], ObjectTooLarge)
    assert [o for i, o in enumerate(outcomes) if i != 6] == [Put.STORED] * 7
    assert client.batch_get(keys) == [*values[:6], None, values[7]]
    assert [r[0].messenger for r in client.replicas(["k2", "k5", "k0"])] == ["m1", "m1", "m0"]


def test_an_open_read_does_not_expire_however_long_the_batch_takes() -> None:
    """G6"""
    state = state_of(64 * KIB)
    keys = [f"k{i}" for i in range(500)]
    assert all(put(state, k) for k in keys)
    lease, spans = state.open_read(SESSION, keys)
    state._clock.advance(24 * 3600.0)  # type: ignore[attr-defined]
    for i in range(2000):
        put(state, f"x{i}")
    again, spans_later = state.open_read(SESSION, keys)
    assert spans_later == spans
    assert state.close_read(SESSION, [lease, again]) == [True, True]
