"""Memory and disk of one messenger together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.store.embedded import EmbeddedPool
from moonpool.store.messenger.disk import DiskConfig
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.types import Pin, PutOptions, Removed

MIB = 1 << 20


def pattern(key: str, size: int = MIB) -> bytes:
    return random.Random(key).randbytes(1024) * (size // 1024)


@pytest.fixture
def disk(tmp_path: Path) -> DiskConfig:
    return DiskConfig(folder=str(tmp_path / "disk"), capacity=64 * MIB, fsync=False)


@pytest.fixture
def pool(disk: DiskConfig) -> Iterator[EmbeddedPool]:
    with no_leaks(), EmbeddedPool(8 * MIB, disk=disk) as pool:
        yield pool
        pool.service.check_integrity()


def fill(pool: EmbeddedPool, keys: list[str]) -> None:
    """Slowly enough for the disk."""
    for key in keys:
        pool.put(key, pattern(key))
        assert eventually(lambda: at_rest(pool))


def at_rest(pool: EmbeddedPool) -> bool:
    """The write-behind thread has nothing to do."""
    stats = pool.stats()
    return stats.used <= stats.capacity / 2 or stats.disk_objects >= len(list(pool.keys()))


def test_what_is_listed_can_be_read_and_what_is_not_does_not_exist(pool: EmbeddedPool) -> None:
    """A5"""
    keys = [f"k{i}" for i in range(40)]
    fill(pool, keys)
    listed = set(pool.keys())
    assert len(listed) > 20
    for key in keys:
        assert pool.is_exist(key) == (key in listed)
        assert pool.batch_get([key]) == [pattern(key) if key in listed else None]
    assert pool.stats().disk_reads > 0


def test_a_batch_larger_than_memory_gives_what_fits_and_no_wrong_byte(pool: EmbeddedPool) -> None:
    keys = [f"k{i}" for i in range(20)]
    fill(pool, keys)
    got = pool.batch_get(keys)
    assert sum(g is not None for g in got) >= 5
    assert all(g in (None, pattern(k)) for k, g in zip(keys, got, strict=True))


def test_a_restart_finds_what_was_written_down(disk: DiskConfig) -> None:
    with EmbeddedPool(4 * MIB, disk=disk) as pool:
        fill(pool, [f"k{i}" for i in range(10)])
        written = set(pool.service._below.disk.keys()) if pool.service._below else set()
    assert written
    with EmbeddedPool(4 * MIB, disk=disk) as pool:
        assert set(pool.keys()) == written
        for key in written:
            assert pool.get(key) == pattern(key)


def test_what_was_removed_stays_away(disk: DiskConfig) -> None:
    with EmbeddedPool(4 * MIB, disk=disk) as pool:
        keys = [f"k{i}" for i in range(10)]
        fill(pool, keys)
        removed = pool.batch_remove(keys)
        assert Removed.REMOVED in removed
        assert not any(pool.batch_is_exist(keys))
    with EmbeddedPool(4 * MIB, disk=disk) as pool:
        assert list(pool.keys()) == []


def test_an_object_that_was_replaced_never_comes_back_from_the_disk(pool: EmbeddedPool) -> None:
    fill(pool, [f"k{i}" for i in range(8)])
    assert pool.service._below is not None
    on_disk = pool.service._below.disk.keys()
    for key in on_disk:
        pool.put(key, pattern("new" + key), PutOptions(replace=True))
        assert pool.get(key) == pattern("new" + key)
    fill(pool, [f"more{i}" for i in range(16)])
    for key in on_disk:
        assert pool.batch_get([key])[0] in (None, pattern("new" + key))


def test_one_tenants_remove_all_leaves_the_other_tenants_disk(disk: DiskConfig) -> None:
    """B6, for both tiers"""
    with EmbeddedPool(4 * MIB, disk=disk) as pool:
        other = EmbeddedTenant(pool, "b")
        keys = [f"k{i}" for i in range(6)]
        fill(pool, keys)
        other.fill(keys)
        assert other.pool.remove_all() == 6
        assert list(other.pool.keys()) == []
        assert sorted(pool.keys()) == keys
        other.pool.close()
    with EmbeddedPool(4 * MIB, disk=disk) as pool:
        assert all(pool.get(k) == pattern(k) for k in list(pool.keys()))


class EmbeddedTenant:
    """Another tenant of the same messenger."""

    def __init__(self, host: EmbeddedPool, tenant: str) -> None:
        from moonpool.store.client import PoolClient
        from moonpool.store.links import MessengerLink
        from moonpool.wire.rpc import LocalChannel

        self._host = host
        self.pool = PoolClient(lambda: MessengerLink.mapped(LocalChannel(host.service), tenant), tenant=tenant)

    def fill(self, keys: list[str]) -> None:
        for key in keys:
            self.pool.put(key, pattern("other" + key, MIB // 4))
            eventually(lambda: at_rest(self._host), timeout_s=0.3)


def test_a_hard_pin_stays_in_memory(pool: EmbeddedPool) -> None:
    pool.put("pinned", pattern("pinned"), PutOptions(pin=Pin.HARD))
    fill(pool, [f"k{i}" for i in range(20)])
    [[replica]] = pool.replicas(["pinned"])
    assert (replica.tier, replica.pin) == ("memory", Pin.HARD)
