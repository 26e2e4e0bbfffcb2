"""Several messengers in one pool, near and far: copies, moves, replacing, tenants and quotas, secrets."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.errors import AccessDenied, ConfigError, NotEnoughMessengers, NotFound, QuotaExceeded
from moonpool.store.client import PoolClient
from moonpool.store.host import MessengerHost
from moonpool.store.master.service import MasterService
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.types import Pin, PutOptions, Removed
from moonpool.wire.auth import Security
from moonpool.wire.rpc import Server

MIB = 1 << 20
SECRET = Security(secret=b"a secret of this pool", admin_secret=b"and one of its admins")


def pattern(key: str, size: int = 64 << 10) -> bytes:
    return random.Random(key).randbytes(size)


class Pool:
    """A master and messengers in this process, over their real sockets."""

    def __init__(self, folder: Path, security: Security = Security(), count: int = 3) -> None:
        self.security = security
        self.service = MasterService()
        self.master = Server(str(folder / "master.sock"), self.service, security=security)
        self.hosts = [
            MessengerHost(
                name=f"m{i}",
                socket=str(folder / f"m{i}.sock"),
                capacity=8 * MIB,
                master=self.master.path,
                listen="127.0.0.1:0",
                security=security,
            )
            for i in range(count)
        ]
        self.clients: list[PoolClient] = []
        assert all(host.wait_joined(10) for host in self.hosts)

    def client(
        self, home: int = 0, *, far: bool = False, tenant: str = "", security: Security | None = None
    ) -> PoolClient:
        """`far`: over TCP, as from another machine."""
        host = self.hosts[home]
        client = PoolClient.connect(
            self.master.path,
            messenger=host.info().listen if far else host.info().socket,
            tenant=tenant,
            security=security or self.security,
            shared_memory=not far,
        )
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for host in self.hosts:
            host.service.check_integrity()
            host.close()
        self.master.close()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with no_leaks():
        pool = Pool(tmp_path)
        yield pool
        pool.close()


@pytest.fixture(params=["near", "far"])
def client(request: pytest.FixtureRequest, pool: Pool) -> PoolClient:
    return pool.client(far=request.param == "far")


def test_what_one_client_put_every_other_has(pool: Pool, client: PoolClient) -> None:
    keys = [f"k{i}" for i in range(20)]
    client.batch_put(keys, [pattern(k) for k in keys])
    for other in (pool.client(1), pool.client(2, far=True)):
        assert other.batch_is_exist(keys) == [True] * 20
        assert other.batch_get(keys) == [pattern(k) for k in keys]
        outs = [bytearray(len(pattern(k)) + 3) for k in keys]
        assert other.batch_get_into(keys, outs) == [64 << 10] * 20
        assert [bytes(o[:-3]) for o in outs] == [pattern(k) for k in keys]
        assert other.sizes([*keys, "none"]) == [64 << 10] * 20 + [None]


def test_a_put_is_seen_by_others_as_soon_as_it_is_acknowledged(pool: Pool) -> None:
    a, b = pool.client(0), pool.client(1)
    for i in range(50):
        a.put(f"k{i}", b"x")
        assert b.is_exist(f"k{i}")
        a.remove(f"k{i}")
        assert not b.is_exist(f"k{i}")


def test_copies_lie_on_different_messengers_and_outlive_one(pool: Pool, client: PoolClient) -> None:
    """F10"""
    client.put("k", pattern("k"), PutOptions(replicas=2))
    [replicas] = client.replicas(["k"])
    assert len({r.messenger for r in replicas}) == 2
    holders = [int(r.messenger[1:]) for r in replicas]
    other = pool.client(next(i for i in range(3) if i not in holders))
    pool.hosts[holders[0]].close()
    assert eventually(lambda: other.batch_get(["k"]) == [pattern("k")])


def test_more_copies_than_messengers_are_refused_at_once_and_evict_nothing(pool: Pool, client: PoolClient) -> None:
    """F3"""
    with pytest.raises(NotEnoughMessengers):
        client.put("k", b"x", PutOptions(replicas=4))
    assert client.stats().evictions == 0
    client.put("k", b"x", PutOptions(replicas=4, strict_replicas=False))
    assert len(client.replicas(["k"])[0]) == 3


def test_a_preferred_messenger_gets_the_object(pool: Pool, client: PoolClient) -> None:
    client.put("k", b"x", PutOptions(preferred=("m2",)))
    assert [r.messenger for r in client.replicas(["k"])[0]] == ["m2"]


def test_replacing_is_seen_everywhere_and_an_open_read_keeps_its_bytes(pool: Pool, client: PoolClient) -> None:
    client.put("k", b"old", PutOptions(replicas=2))
    reader = pool.client(1)
    with reader.open_read(["k"]) as lease:
        client.put("k", b"newer", PutOptions(replace=True))
        assert lease.views[0] is not None
        assert bytes(lease.views[0]) == b"old"
    for other in (reader, pool.client(2), client):
        assert other.get("k") == b"newer"
    assert len(client.replicas(["k"])[0]) == 1


@pytest.mark.parametrize("kind", ["copy", "move"])
def test_objects_travel_between_messengers(pool: Pool, client: PoolClient, kind: str) -> None:
    client.put("k", pattern("k", MIB), PutOptions(preferred=("m0",), pin=Pin.HARD))
    task = client.copy("k", ["m1", "m2"]) if kind == "copy" else client.move("k", "m2")
    assert eventually(lambda: client.task(task).state not in ("pending", "running"))
    status = client.task(task)
    assert (status.state, status.error, status.kind) == ("done", "", kind)
    assert status.done == status.total == (2 * MIB if kind == "copy" else MIB)
    expected = ["m0", "m1", "m2"] if kind == "copy" else ["m2"]
    assert sorted(r.messenger for r in client.replicas(["k"])[0]) == expected
    assert {r.pin for r in client.replicas(["k"])[0]} == {Pin.HARD}
    assert client.get("k") == pattern("k", MIB)


def test_a_copy_of_nothing_or_to_nowhere_is_an_error(client: PoolClient) -> None:
    with pytest.raises(NotFound):
        client.copy("none", ["m1"])
    client.put("k", b"x")
    with pytest.raises(NotFound):
        client.copy("k", ["nobody"])
    with pytest.raises(NotFound):
        client.task("m1/4711")


def test_only_one_copy_is_removed_when_a_messenger_is_named(client: PoolClient) -> None:
    client.put("k", b"x", PutOptions(replicas=3))
    assert client.batch_remove(["k"], messenger="m1") == [Removed.REMOVED]
    assert sorted(r.messenger for r in client.replicas(["k"])[0]) == ["m0", "m2"]


def test_what_is_hard_pinned_is_removed_by_force_only(client: PoolClient) -> None:
    client.put("k", b"x", PutOptions(pin=Pin.HARD))
    assert client.batch_remove(["k"]) == [Removed.PINNED]
    assert client.get("k") == b"x"
    assert client.batch_remove(["k"], force=True) == [Removed.REMOVED]


def test_keys_are_listed_once_and_found_and_removed_by_pattern(pool: Pool, client: PoolClient) -> None:
    client.batch_put([f"a{i}" for i in range(5)], [b"x"] * 5, PutOptions(replicas=2))
    pool.client(1).batch_put([f"b{i}" for i in range(5)], [b"x"] * 5)
    assert sorted(client.keys()) == sorted([f"a{i}" for i in range(5)] + [f"b{i}" for i in range(5)])
    assert sorted(client.query_by_regex("^a[0-2]$")) == ["a0", "a1", "a2"]
    assert client.remove_by_regex("^a") == 5
    assert client.remove_all() == 5
    assert list(client.keys()) == []
    with pytest.raises(ConfigError):
        client.query_by_regex("(")


def test_tenants_do_not_see_each_other(pool: Pool) -> None:
    """B6, Q2"""
    a, b, default = pool.client(tenant="a"), pool.client(1, tenant="b"), pool.client(2)
    for client, value in ((a, b"a's"), (b, b"b's"), (default, b"mine")):
        client.put("k", value, PutOptions(replicas=2))
    assert [c.get("k") for c in (a, b, default)] == [b"a's", b"b's", b"mine"]
    assert a.remove_all() == 1 or not a.is_exist("k")
    assert [c.batch_get(["k"])[0] for c in (a, b, default)] == [None, b"b's", b"mine"]
    assert list(b.keys()) == ["k"]
    with pytest.raises(Exception, match="not a key"):
        default.put("\x1fb\x1fk", b"forged")
    assert b.get("k") == b"b's"


def test_a_quota_evicts_the_tenants_own_objects_and_nobody_elses(pool: Pool) -> None:
    """F5"""
    admin, a = pool.client(), pool.client(tenant="a")
    admin.put("other", bytes(MIB))
    admin.set_quota("a", 2 * MIB)
    assert eventually(lambda: all("a" in host.service._state._quotas for host in pool.hosts))
    for i in range(6):
        a.put(f"k{i}", bytes(MIB // 2), PutOptions(preferred=("m0",)))
        assert a.is_exist(f"k{i}"), "what returned ok is readable right after"
    assert admin.is_exist("other")
    assert sum(a.batch_is_exist([f"k{i}" for i in range(6)])) == 4
    only_here = pool.client(tenant="a")
    with pytest.raises(QuotaExceeded):
        only_here.put("big", bytes(3 * MIB))
    assert sum(a.batch_is_exist([f"k{i}" for i in range(6)])) == 4


def test_a_pool_with_a_secret_is_closed_to_others_and_admins_are_few(tmp_path: Path) -> None:
    with no_leaks():
        pool = Pool(tmp_path, SECRET, count=2)
        user = pool.client(far=True, security=Security(secret=SECRET.secret))
        user.put("k", pattern("k"))
        assert pool.client(1).get("k") == pattern("k")
        with pytest.raises(AccessDenied):
            user.set_quota("a", 1)
        with pytest.raises(AccessDenied):
            user.drain("m0")
        pool.client().set_quota("a", 1)
        for wrong in (Security(), Security(secret=b"not the secret at all")):
            with pytest.raises(AccessDenied):
                PoolClient.connect(pool.master.path, security=wrong)
        pool.close()


def test_a_draining_messenger_takes_nothing_new_but_gives_what_it_has(pool: Pool) -> None:
    client = pool.client()
    client.put("old", b"x")
    client.drain("m0")
    client.put("new", b"y")
    assert [r.messenger for r in client.replicas(["new"])[0]] != ["m0"]
    assert client.get("old") == b"x"
    client.drain("m0", on=False)
    client.put("newer", b"z", PutOptions(preferred=("m0",)))
