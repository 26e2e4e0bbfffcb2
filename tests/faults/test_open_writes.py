"""What is reserved stays the writer's while it may write to it, whatever becomes of the connection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.errors import MoonpoolError
from moonpool.store.base import Reservation
from moonpool.store.messenger import quarantine
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.types import Put, PutOptions
from tests.cluster.test_many_messengers import Pool

MIB = 1 << 20


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    monkeypatch.setattr(quarantine, "HELD_S", 0.0)  # as if a minute had gone by since the session's end
    with no_leaks():
        pool = Pool(tmp_path, count=2)
        yield pool
        pool.close()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("end", ["commit", "revoke", "both"])
def test_a_slow_writer_whose_connection_was_given_up_overwrites_nobody(pool: Pool, replicas: int, end: str) -> None:
    writer, other = pool.client(0), pool.client(0)
    [r] = writer.reserve([("slow", MIB)], PutOptions(replicas=replicas))
    assert isinstance(r, Reservation)
    link = writer._home.get()
    writer._home._drop(link, pause_s=0.0)  # as a call of another thread does that took too long
    for i in range(40):  # everything that may go goes
        other.put(f"x{i}", bytes([i]) * (MIB // 2), PutOptions(preferred=("m0",)))
    r.view[:] = b"\xff" * MIB
    there = [i for i in range(40) if other.is_exist(f"x{i}")]
    assert len(there) > 5
    assert all(other.get(f"x{i}") == bytes([i]) * (MIB // 2) for i in there)
    if end != "revoke":
        [outcome] = writer.commit([r])
        assert outcome is Put.STORED or isinstance(outcome, MoonpoolError)
    if end != "commit":
        writer.revoke([r])
    assert eventually(lambda: other.stats().writes_open == 0)
    writer.remove("slow")
    assert writer.put("slow", b"new") is Put.STORED
    assert writer.get("slow") == b"new"
