"""`MooncakePool` against a fake of the peer: faults that the real one shows only when something breaks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from moonpool.config import parse
from moonpool.errors import (
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    KeyBusy,
    MoonpoolError,
    NoSpace,
    NotFound,
    ObjectTooLarge,
    PoolClosed,
    PoolError,
    Unsupported,
)
from moonpool.keys import PageKey
from moonpool.store.base import Match, Reservation
from moonpool.store.mooncake import MooncakeConfig, MooncakePool
from moonpool.store.mooncake.codes import ERRORS, error_of
from moonpool.store.mooncake.config import size_of
from moonpool.store.mooncake.limits import Cannot
from moonpool.store.mooncake.peer import PeerStore, connect
from moonpool.testing.leaks import eventually
from moonpool.types import Pin, Put, PutOptions, Removed, Stored
from tests.store.fake_peer import MODULE, FakeAdmin, FakeStore

SLAB = 64 << 10
KEY = PageKey("a" * 32, 3, "c" * 32)
BUNDLE = "b" * 32
DOCS = Path(__file__).parents[2] / "docs/existing-engine.md"


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def pool(store: FakeStore) -> Iterator[MooncakePool]:
    """Whatever a test leaves in the slab is a failure."""
    with MooncakePool(PeerStore(store, MODULE), slab_size=SLAB, admin=FakeAdmin(store)) as pool:
        yield pool
        pool.slab.check_integrity()
        assert pool.slab.used == 0
    assert not store.registered


# -- the slab bounds what is open


def test_a_full_slab_is_no_space_with_figures_and_heals(pool: MooncakePool) -> None:
    held = pool.reserve([(f"w{i}", SLAB // 4) for i in range(4)])
    [refused] = pool.reserve([("more", 8)])
    assert isinstance(refused, NoSpace)
    assert (refused.need, "0 B in one piece" in refused.have) == ("8 B in one piece", True)
    pool.revoke([r for r in held if isinstance(r, Reservation)])
    assert pool.put("more", bytes(8)) is Put.STORED


def test_a_read_that_does_not_fit_the_slab_takes_nothing_of_it(pool: MooncakePool, store: FakeStore) -> None:
    store.objects = {"a": bytes(SLAB // 2), "b": bytes(SLAB), "c": bytes(SLAB + 1)}
    with pytest.raises(NoSpace):
        pool.open_read(["a", "b"])
    with pytest.raises(ObjectTooLarge):
        pool.open_read(["a", "c"])
    assert pool.slab.used == 0
    assert pool.get("b") == bytes(SLAB)


def test_a_key_that_is_read_twice_takes_space_once(pool: MooncakePool, store: FakeStore) -> None:
    store.objects = {"a": b"x" * SLAB}
    with pool.open_read(["a", "a"]) as lease:
        assert [bytes(v or b"") for v in lease.views] == [b"x" * SLAB] * 2


def test_a_put_that_fails_gives_its_space_back(pool: MooncakePool, store: FakeStore) -> None:
    [r] = pool.reserve([("k", SLAB)])
    assert isinstance(r, Reservation)
    store.code = -200
    [outcome] = pool.commit([r])
    assert isinstance(outcome, NoSpace)
    assert pool.slab.used == 0


# -- what the peer's answers mean


def test_a_get_that_is_shorter_than_the_object_is_a_miss(pool: MooncakePool, store: FakeStore) -> None:
    store.objects, store.short = {"k": b"0123456789"}, 1
    assert pool.batch_get(["k"]) == [None]
    store.short = 0
    assert pool.batch_get(["k"]) == [b"0123456789"]


def test_what_is_gone_between_size_and_get_is_a_miss(store: FakeStore) -> None:
    class Evicting(FakeStore):
        def get_size(self, key: str, /) -> int:
            size = super().get_size(key)
            self.objects.clear()
            return size

    store = Evicting(objects={"k": b"0123456789"}, tiers={"k": "local disk"})
    with MooncakePool(PeerStore(store, MODULE), slab_size=SLAB) as pool:
        assert pool.batch_get(["k"]) == [None]
        assert pool.slab.used == 0


@pytest.mark.parametrize("tier", ["memory", "disk", "local disk"])
def test_objects_are_read_wherever_they_lie(pool: MooncakePool, store: FakeStore, tier: str) -> None:
    store.objects, store.tiers = {"k": b"0123456789"}, {"k": tier}
    assert pool.get("k") == b"0123456789"


def test_arrays_are_stored_whole_whatever_their_items(pool: MooncakePool) -> None:
    array = np.arange(10, dtype=np.int64)
    pool.put("k", array)
    assert pool.get("k") == array.tobytes(), "the peer's own put stores 10 of the 80 bytes"


def test_with_the_master_away_reads_miss_and_writes_fail_typed(pool: MooncakePool, store: FakeStore) -> None:
    [r] = pool.reserve([("k", 8)])
    assert isinstance(r, Reservation)
    store.code = -900
    assert pool.batch_is_exist(["k"]) == [False]
    assert pool.lookup([KEY], [BUNDLE]) == [None]
    assert pool.batch_get(["k"]) == [None]
    assert isinstance(pool.commit([r])[0], ConnectionLost)
    [refused] = pool.reserve([("k", 8)])
    assert isinstance(refused, ConnectionLost)
    store.code = 0
    assert pool.put("k", b"again") is Put.STORED


def test_codes_become_typed_errors_that_carry_key_and_code() -> None:
    kinds = {
        -200: NoSpace,
        -704: NotFound,
        -706: KeyBusy,
        -900: ConnectionLost,
        -901: DeadlineExceeded,
        -1001: ConnectionLost,
    }
    for code, kind in kinds.items():
        error = error_of(code, "the key")
        assert type(error) is kind
        assert (error.key, str(code) in error.have) == ("the key", True)
    assert type(error_of(-31337)) is PoolError


def test_empty_objects_are_refused_by_name(pool: MooncakePool) -> None:
    done, empty = pool.batch_put(["a", "b"], [b"x", b""])
    assert done is Put.STORED
    assert isinstance(empty, Unsupported)


def test_what_is_leased_is_not_removed(pool: MooncakePool, store: FakeStore) -> None:
    store.objects, store.leased = {"a": b"x", "b": b"x"}, {"b"}
    assert [bool(r) for r in pool.batch_remove(["a", "b", "c"])] == [True, False, False]


def test_what_one_asks_of_a_put_reaches_the_peer_in_its_words(pool: MooncakePool, store: FakeStore) -> None:
    options = PutOptions(
        replicas=2, strict_replicas=False, preferred=("a:1", "b:2"), pin=Pin.SOFT, soft_pin_ttl_s=1.5, groups=("g", "")
    )
    assert pool.batch_put(["x", "y"], [b"1", b"2"], options=options) == [Put.STORED] * 2
    [asked] = store.configs
    assert (asked.replica_num, asked.preferred_segments, asked.group_ids) == (2, ["a:1", "b:2"], ["g", ""])
    assert (asked.soft_pin_action, asked.soft_pin_ttl_ms, asked.with_hard_pin) == ("enable", 1500, False)
    pool.put("z", b"3", options=PutOptions(pin=Pin.HARD))
    assert store.configs[1].with_hard_pin
    with pytest.raises(ConfigError):
        pool.reserve([("w", 1)], PutOptions(groups=("g", "h")))


@pytest.mark.parametrize("options", [PutOptions(replace=True), PutOptions(replicas=2)])
def test_what_the_peer_would_do_wrongly_is_not_asked_of_it(
    pool: MooncakePool, store: FakeStore, options: PutOptions
) -> None:
    with pytest.raises(Unsupported):
        pool.put("k", b"x", options=options)
    assert "batch_put_from" not in store.calls


def test_removing_tells_what_was_missing_from_what_is_held(pool: MooncakePool, store: FakeStore) -> None:
    def fill() -> None:
        store.objects, store.leased = {"a": b"x", "b": b"x"}, {"b"}

    fill()
    assert pool.batch_remove(["a", "b", "c"]) == [Removed.REMOVED, Removed.PINNED, Removed.MISSING]
    assert pool.batch_remove(["b"], force=True) == [Removed.REMOVED]
    fill()
    assert pool.batch_remove(["a", "b", "c"], messenger="fake:1") == [Removed.REMOVED, Removed.PINNED, Removed.MISSING]
    with pytest.raises(NotFound):
        pool.batch_remove(["b"], messenger="elsewhere:1")
    with pytest.raises(Unsupported):
        pool.batch_remove(["b"], messenger="fake:1", force=True)
    fill()
    assert (pool.remove_all(), pool.remove_all(force=True)) == (1, 1)
    store.code = -900
    assert pool.batch_remove(["a"]) == [Removed.MISSING]
    with pytest.raises(ConnectionLost):
        pool.remove_all()


def test_sizes_and_replicas(pool: MooncakePool, store: FakeStore) -> None:
    store.objects, store.tiers = {"a": b"123", "b": b"12345"}, {"b": "local disk"}
    assert pool.sizes(["b", "no", "a", "a"]) == [5, None, 3, 3]
    [memory], [disk], none = pool.replicas(["a", "b", "no"])
    assert (memory.messenger, memory.size, memory.tier) == ("fake:1", 3, "memory")
    assert (disk.tier, none) == ("disk", [])


def test_tasks_go_on_at_the_peer(pool: MooncakePool, store: FakeStore) -> None:
    store.objects = {"k": b"123"}
    task = pool.copy("k", ["fake:2"])
    first = pool.task(task)
    assert (first.kind, first.key, first.targets, first.state, first.total) == ("copy", "k", ("fake:2",), "pending", 3)
    [reply] = store.tasks.values()
    for name, state, done in (("PROCESSING", "running", 0), ("SUCCESS", "done", 3), ("FAILED", "failed", 0)):
        reply.status, reply.message = SimpleNamespace(name=name), "why"
        status = pool.task(task)
        assert (status.state, status.done, status.error) == (state, done, "why" if name == "FAILED" else "")
    assert pool.task(pool.move("k", "fake:2", source="fake:1")).source == "fake:1"
    for bad in (
        lambda: pool.copy("no", ["fake:2"]),
        lambda: pool.copy("k", ["nowhere"]),
        lambda: pool.task("77-1"),
        lambda: pool.task("x"),
    ):
        with pytest.raises(NotFound):
            bad()
    with pytest.raises(Unsupported):
        pool.copy("k", ["fake:2"], source="fake:1")


def test_what_only_the_admin_port_tells_names_it_where_there_is_none(store: FakeStore) -> None:
    store.objects = {"k": b"1"}
    with MooncakePool(PeerStore(store, MODULE), slab_size=SLAB) as pool:
        calls: list[Callable[[], object]] = [
            lambda: list(pool.keys()),
            pool.messengers,
            lambda: pool.query_by_regex("."),
            lambda: pool.batch_remove(["k"], messenger="fake:1"),
            lambda: pool.move("k", "fake:2"),
        ]
        for call in calls:
            with pytest.raises(ConfigError) as e:
                call()
            assert e.value.key == "admin_address"
        assert (pool.stats().capacity, pool.sizes(["k"])) == (0, [1])


# -- one key, many writers


def test_a_put_is_stored_once_however_the_peer_answers(pool: MooncakePool, store: FakeStore) -> None:
    """The peer says 0 for a key that exists; within this process the first writer is told from the second."""
    store.gate = threading.Event()
    outcomes: list[object] = []
    threads = [threading.Thread(target=lambda: outcomes.extend(pool.batch_put(["k"], [b"x"]))) for _ in range(2)]
    for t in threads:
        t.start()
    assert eventually(lambda: store.calls.count("batch_is_exist") == 2)
    store.gate.set()
    for t in threads:
        t.join()
    assert outcomes.count(Put.STORED) == 1
    assert pool.put("k", b"x") is Put.EXISTED


def test_a_fault_of_the_probe_leaves_no_key_taken(store: FakeStore) -> None:
    class Faulty(FakeStore):
        def batch_is_exist(self, keys: list[str], /) -> list[int]:
            raise RuntimeError("the binding raised")

    faulty = Faulty()
    with MooncakePool(PeerStore(faulty, MODULE), slab_size=SLAB) as pool:
        with pytest.raises(RuntimeError):
            pool.put("k", b"x")
        assert pool.stats().writes_open == 0
        faulty.batch_is_exist = store.batch_is_exist  # type: ignore[method-assign]
        assert pool.put("k", b"x") is Put.STORED


def test_a_native_page_is_given_though_a_converted_one_stays(pool: MooncakePool) -> None:
    converted = KEY.converted(BUNDLE).text
    pool.put(converted, b"approximate")
    stream = pool.subscribe([KEY.owner])
    pool.put(KEY.text, b"exact")
    assert stream.next(10, 1.0) == [Stored(KEY.text, 5)]
    assert pool.is_exist(converted), Cannot.NATIVE_REPLACES_CONVERTED.value
    assert pool.lookup([KEY], [BUNDLE]) == [Match(KEY.text, False)]


# -- the peer kills the interpreter when it is not open


def test_no_call_reaches_a_closed_store(pool: MooncakePool, store: FakeStore) -> None:
    [r] = pool.reserve([("w", 8)])
    store.objects["k"] = b"x"
    lease = pool.open_read(["k"])
    assert isinstance(r, Reservation)
    pool.close()
    pool.close()
    calls: list[Callable[[], object]] = [
        lambda: pool.put("k", b"v"),
        lambda: pool.get("k"),
        lambda: pool.commit([r]),
        lambda: pool.lookup([KEY]),
        lambda: pool.is_exist("k"),
        lambda: pool.remove("k"),
        lambda: pool.hint([KEY]),
        lambda: pool.subscribe([]),
        lambda: pool.sizes(["k"]),
        lambda: pool.replicas(["k"]),
        lambda: pool.copy("k", ["m"]),
        lambda: pool.move("k", "m", source="n"),
        lambda: pool.task("1-1"),
        lambda: list(pool.keys()),
        pool.remove_all,
        pool.messengers,
        pool.get_c2c_config,
        pool.stats,
    ]
    for call in calls:
        with pytest.raises(PoolClosed):
            call()
    lease.close()
    pool.revoke([r])


def refuses(pool: MooncakePool) -> bool:
    try:
        pool.get_c2c_config()
    except PoolClosed:
        return True
    return False


def test_closing_waits_for_calls_under_way(pool: MooncakePool, store: FakeStore) -> None:
    store.gate = threading.Event()
    probing = threading.Thread(target=pool.is_exist, args=("k",))
    probing.start()
    assert eventually(lambda: "batch_is_exist" in store.calls)
    closing = threading.Thread(target=pool.close)
    closing.start()
    assert eventually(lambda: refuses(pool))
    assert not store.closed
    store.gate.set()
    closing.join()
    probing.join()
    assert store.closed


def test_a_slab_that_the_peer_does_not_register_is_an_error_and_nothing_stays_open() -> None:
    store = FakeStore(register_code=-600)
    with pytest.raises(PoolError):
        MooncakePool(PeerStore(store, MODULE), slab_size=SLAB)
    assert store.closed


# -- joining


NOWHERE = MooncakeConfig(master_server_address="127.0.0.1:1", local_hostname="127.0.0.1")
ELECTED = msgspec.structs.replace(NOWHERE, master_server_address="etcd://nowhere:2379")


class Unready(FakeStore):
    """Its setup fails; anything but letting it go would then kill the interpreter."""

    def setup(self, *_: object, **__: object) -> int:
        self.calls.append("setup")
        return -1


def test_without_a_master_the_address_and_the_cause_are_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Unready()
    monkeypatch.setitem(sys.modules, "mooncake.store", SimpleNamespace(MooncakeDistributedStore=lambda: store))
    with pytest.raises(ConnectionLost) as e:
        connect(NOWHERE)
    assert (e.value.key, "refused" in e.value.have, store.calls) == ("127.0.0.1:1", True, [])


def test_a_failed_setup_is_an_error_and_the_store_is_not_touched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Unready()
    monkeypatch.setitem(sys.modules, "mooncake.store", SimpleNamespace(MooncakeDistributedStore=lambda: store))
    with pytest.raises(ConnectionLost) as e:
        connect(ELECTED)
    assert (e.value.have, store.calls) == ("code -1", ["setup"])


def test_without_the_package_its_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError) as e:
        connect(NOWHERE)
    assert "pip install mooncake-transfer-engine-non-cuda" in str(e.value)


def test_the_drop_in_is_not_taken_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    own = type("MooncakeDistributedStore", (), {"__module__": "moonpool.integrations.mooncake_api.store"})
    monkeypatch.setitem(sys.modules, "mooncake.store", SimpleNamespace(MooncakeDistributedStore=own))
    with pytest.raises(ConfigError, match="drop-in"):
        connect(NOWHERE)


def test_the_config_is_checked_and_names_the_nearest_field() -> None:
    good = b"master_server_address: 'h:1'\nlocal_hostname: h\nglobal_segment_size: 4gb\nslab_size: 512 MB\n"
    config = parse(good, MooncakeConfig)
    assert (size_of(config.global_segment_size, ""), size_of(config.slab_size, "")) == (4 << 30, 512 << 20)
    for bad, said in (
        (good + b"master_server_addr: h\n", "master_server_address"),
        (good.replace(b"4gb", b"50%"), "global_segment_size"),
        (good.replace(b"4gb", b"1mb"), "global_segment_size"),
        (good.replace(b"512 MB", b"-1"), "slab_size"),
    ):
        with pytest.raises(ConfigError) as e:
            parse(bad, MooncakeConfig)
        assert said in str(e.value)


def test_the_document_lists_every_limit_and_every_error() -> None:
    text = DOCS.read_text()
    assert [c.name for c in Cannot if c.value not in text] == []
    assert [code for code, (kind, _) in ERRORS.items() if f"| {code} | `{kind.__name__}`" not in text] == []
    assert issubclass(Unsupported, MoonpoolError)
