"""What every `KVPool` must do beyond put, get and events: listing, sizes, replicas, patterns, pins."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moonpool.errors import ConfigError, NotFound
from moonpool.store.base import KVPool
from moonpool.testing.leaks import eventually
from moonpool.types import MessengerInfo, Pin, Put, PutOptions, Removed

MIB = 1 << 20


@pytest.fixture
def pool(fresh: Callable[[int], KVPool]) -> KVPool:
    pool = fresh(4 * MIB)
    assert pool.batch_put(["a-1", "a-2", "b-1"], [b"x", b"yy", b"zzz"]) == [Put.STORED] * 3
    return pool


@pytest.fixture
def messenger(pool: KVPool, pool_kind: str) -> MessengerInfo:
    """The only one of the pool."""
    if pool_kind == "embedded":
        pytest.skip("an embedded pool is one messenger, which its master is not told of")
    assert eventually(lambda: len(pool.messengers()) == 1)
    return pool.messengers()[0]


def test_sizes_stand_in_the_order_of_the_keys(pool: KVPool) -> None:
    assert pool.sizes(["b-1", "nowhere", "a-1", "b-1"]) == [3, None, 1, 3]
    assert pool.sizes([]) == []


def test_all_keys_are_listed_once(pool: KVPool) -> None:
    assert sorted(pool.keys()) == ["a-1", "a-2", "b-1"]


def test_patterns_are_pythons_and_found_anywhere_in_the_key(pool: KVPool) -> None:
    assert sorted(pool.query_by_regex("(?i)A-")) == ["a-1", "a-2"]
    assert sorted(pool.query_by_regex("1$")) == ["a-1", "b-1"]
    assert pool.query_by_regex("nothing") == []
    with pytest.raises(ConfigError):
        pool.query_by_regex("(")


def test_removing_by_pattern_removes_just_that(pool: KVPool) -> None:
    assert pool.remove_by_regex("^a") == 2
    assert list(pool.keys()) == ["b-1"]
    assert pool.remove_by_regex("^a") == 0


def test_remove_all_counts(pool: KVPool) -> None:
    assert pool.remove_all() == 3
    assert list(pool.keys()) == []
    assert pool.remove_all() == 0


def test_replicas_name_a_messenger_of_the_pool(pool: KVPool, messenger: MessengerInfo) -> None:
    assert messenger.capacity >= 4 * MIB
    [[replica], missing] = pool.replicas(["b-1", "nowhere"])
    assert (replica.messenger, replica.size, replica.tier, missing) == (messenger.name, 3, "memory", [])


def test_one_replica_is_removed_from_the_messenger_that_is_named(pool: KVPool, messenger: MessengerInfo) -> None:
    assert pool.batch_remove(["a-1", "nowhere"], messenger=messenger.name) == [Removed.REMOVED, Removed.MISSING]
    assert sorted(pool.keys()) == ["a-2", "b-1"]
    with pytest.raises(NotFound):
        pool.batch_remove(["a-2"], messenger="no such messenger")


@pytest.mark.needs("keep_hard_pinned")
def test_what_is_hard_pinned_goes_by_force_only(pool: KVPool) -> None:
    pool.put("pinned", b"x", PutOptions(pin=Pin.HARD))
    assert pool.batch_remove(["pinned"]) == [Removed.PINNED]
    assert pool.is_exist("pinned")
    assert pool.batch_remove(["pinned"], force=True) == [Removed.REMOVED]


@pytest.mark.parametrize("pin", list(Pin))
def test_pinned_and_grouped_objects_are_read_like_others(pool: KVPool, pin: Pin) -> None:
    options = PutOptions(pin=pin, soft_pin_ttl_s=60.0, groups=("g", ""))
    assert pool.batch_put(["x", "y"], [b"1", b"2"], options) == [Put.STORED] * 2
    assert pool.batch_get(["x", "y"]) == [b"1", b"2"]
    assert pool.put("x", b"other", PutOptions(pin=pin)) is Put.EXISTED


def test_more_copies_than_messengers_are_as_many_as_there_are_where_that_will_do(pool: KVPool) -> None:
    assert pool.put("copies", b"x", PutOptions(replicas=3, strict_replicas=False)) is Put.STORED
    assert [len(r) for r in pool.replicas(["copies"])] == [1]


@pytest.mark.needs("replace")
def test_replacing_gives_the_new_bytes_and_open_reads_the_old_ones(pool: KVPool) -> None:
    with pool.open_read(["a-1"]) as lease:
        assert pool.put("a-1", b"new", PutOptions(replace=True)) is Put.STORED
        assert bytes(lease.views[0] or b"") == b"x"
    assert pool.get("a-1") == b"new"


def test_what_is_not_there_is_neither_copied_nor_moved(pool: KVPool, messenger: MessengerInfo) -> None:
    for call in (
        lambda: pool.copy("nowhere", [messenger.name]),
        lambda: pool.copy("a-1", ["no such messenger"]),
        lambda: pool.move("a-1", "no such messenger"),
        lambda: pool.task("no such task"),
    ):
        with pytest.raises(NotFound):
            call()
