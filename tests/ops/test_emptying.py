"""`moonpool drain`: everything moves, for every tenant, and nothing is lost that fits elsewhere."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from moonpool.errors import Draining, NotFound
from moonpool.ops.emptying import Emptying, Report
from moonpool.store.host import MessengerHost
from moonpool.store.messenger.disk import DiskConfig
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.types import Pin, Put, PutOptions
from tests.ops.support import MIB, SmallPool, small_pool


def empty(small: SmallPool, name: str = "m0") -> Report:
    with Emptying(small.master, name) as emptying:
        emptying.stop_puts()
        return emptying.run()


def test_everything_moves_for_every_tenant_and_keeps_its_pin(tmp_path: Path) -> None:
    with no_leaks(), small_pool(tmp_path) as small:
        data = {f"k{i}": os.urandom(1000 + i) for i in range(700)}
        for tenant in ("", "t"):
            small.client(tenant=tenant).batch_put(list(data), list(data.values()))
        small.client().put("pinned", b"p", options=PutOptions(pin=Pin.HARD))
        report = empty(small)
        assert report.empty
        assert report.moved == 2 * len(data) + 1
        assert report.nbytes == 2 * sum(map(len, data.values())) + 1
        assert small.hosts[0].service.stats().objects == 0
        assert small.hosts[0].service.stats().used == 0
        for tenant in ("", "t"):
            pool = small.client("m1", tenant)
            assert [pool.get(k) for k in data] == list(data.values())
        [[replica]] = small.client("m1").replicas(["pinned"])
        assert (replica.messenger, replica.pin) == ("m1", Pin.HARD)


def test_nothing_new_is_taken_from_then_on_and_undo_takes_it_back(tmp_path: Path) -> None:
    with small_pool(tmp_path, messengers=2) as small:
        only_there = PutOptions(preferred=("m0",))
        with Emptying(small.master, "m0") as emptying:
            emptying.stop_puts()
            with closing(small.client()) as other:
                assert eventually(lambda: [i.draining for i in other.messengers()] == [True, False])
                other.put("elsewhere", b"x", options=only_there)
                assert [r.messenger for r in other.replicas(["elsewhere"])[0]] == ["m1"]
            emptying.stop_puts(False)
        assert not small.hosts[0].service.draining
        assert eventually(lambda: not small.service.messengers()[0].draining)
        pool = small.client()
        assert pool.put("again", b"x", options=only_there) is Put.STORED
        assert [r.messenger for r in pool.replicas(["again"])[0]] == ["m0"]


def test_a_copy_that_is_elsewhere_already_costs_no_bytes(tmp_path: Path) -> None:
    with small_pool(tmp_path) as small:
        pool = small.client()
        pool.put("twice", bytes(1000), options=PutOptions(replicas=2))
        assert len(pool.replicas(["twice"])[0]) == 2
        report = empty(small)
        assert report.empty
        assert [r.messenger for r in small.client("m1").replicas(["twice"])[0]] == ["m1"]
        assert small.hosts[1].service.stats().puts == 1


def test_what_does_not_fit_stays_and_is_counted(tmp_path: Path) -> None:
    with small_pool(tmp_path, messengers=1, capacity=8 * MIB) as small:
        small.add("tiny", MIB)
        assert eventually(lambda: len(small.service.messengers()) == 2)
        pool = small.client()
        pool.put("small", bytes(1000))
        pool.put("large", bytes(4 * MIB))
        report = empty(small)
        assert not report.empty
        assert sum(report.failed.values()) == 1
        assert "ObjectTooLarge" in next(iter(report.failed))
        assert pool.get("large") == bytes(4 * MIB), "still served from where it was"
        assert pool.replicas(["small"])[0][0].messenger == "tiny"


def test_open_writes_are_told(tmp_path: Path) -> None:
    with small_pool(tmp_path) as small:
        pool = small.client()
        reservations = pool.reserve([("half", 1000)])
        report = empty(small)
        assert (report.empty, report.writing) == (False, 1)
        pool.revoke([r for r in reservations if not isinstance(r, Put | Exception)])
        assert empty(small).empty


def test_what_lies_on_disk_only_moves_too(tmp_path: Path) -> None:
    with no_leaks(), small_pool(tmp_path, messengers=1) as small:
        disk = DiskConfig(folder=str(tmp_path / "disk"), capacity=64 * MIB)

        def start() -> MessengerHost:
            return MessengerHost(name="d", socket=str(tmp_path / "d"), capacity=MIB, master=small.master, disk=disk)

        host = start()
        small.client("d", "t").put("key", b"k" * 700_000)  # over half of the memory
        assert eventually(lambda: host.service.stats().disk_objects == 1)
        host.close()
        host = start()  # with an empty memory: no tenant is known by its bytes there
        try:
            assert host.service.stats().objects == 0
            host.service.drain(True)
            assert small.client("d", "t").get("key") == b"k" * 700_000, "a draining messenger still serves from disk"
            host.close()
            host = start()
            assert eventually(lambda: len(small.service.messengers()) == 2)
            assert empty(small, "d").moved == 1
            assert host.service.stats().disk_objects == 0
            assert small.client("m0", "t").get("key") == b"k" * 700_000
        finally:
            host.close()


def test_the_last_messenger_is_not_drained_into_nowhere(tmp_path: Path) -> None:
    with small_pool(tmp_path, messengers=1) as small:
        with Emptying(small.master, "m0") as emptying, pytest.raises(NotFound, match="no other messenger"):
            emptying.stop_puts()
        assert small.client().put("key", b"x") is Put.STORED


def test_a_wrong_name_says_which_there_are(tmp_path: Path) -> None:
    with small_pool(tmp_path) as small, pytest.raises(NotFound, match=r"m7.*m0, m1"):
        Emptying(small.master, "m7")


def test_a_draining_pool_refuses_with_its_own_error(tmp_path: Path) -> None:
    with small_pool(tmp_path) as small:
        for host in small.hosts:
            host.service.drain(True)
        [result] = small.client().batch_put(["key"], [b"x"])
        assert isinstance(result, Draining)
