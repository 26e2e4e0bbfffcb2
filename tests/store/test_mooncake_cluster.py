"""What only the real peer shows. Runs with `--pool=mooncake`."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from moonpool.c2c.config import C2CConfig
from moonpool.c2c.converter import Converter
from moonpool.engine.instance import Instance
from moonpool.engine.request import GenerateRequest
from moonpool.errors import ConnectionLost, MoonpoolError, NoSpace, NotFound, PoolClosed, WireError
from moonpool.keys import PageKey
from moonpool.store.base import KVPool, Match
from moonpool.store.mooncake import MooncakePool
from moonpool.system import bundled_system
from moonpool.testing.leaks import eventually
from moonpool.types import Put, PutOptions, Removed, Stored
from tests.c2c.pairs import BUNDLE, PAGE, config, identity_of, keys_of, model, random_kv, rule
from tests.store.peer import PeerMaster

MIB = 1 << 20
pytestmark = pytest.mark.cluster
_names = count()


@pytest.fixture(scope="module")
def master(request: pytest.FixtureRequest) -> Iterator[PeerMaster]:
    if request.config.getoption("--pool") != "mooncake":
        pytest.skip("needs the real peer: --pool=mooncake")
    with PeerMaster() as master:
        yield master


@pytest.fixture(scope="module")
def pool(master: PeerMaster) -> Iterator[MooncakePool]:
    with master.client(32 * MIB) as pool:
        yield pool


@pytest.fixture
def other(master: PeerMaster, pool: MooncakePool) -> Iterator[MooncakePool]:
    """A second client, which lends nothing."""
    with master.client(0, slab=8 * MIB) as other:
        yield other


def page(owner: str = "a" * 32) -> PageKey:
    return PageKey(owner, next(_names), f"{next(_names):032x}")


def test_clients_of_a_cluster_read_each_other_and_hear_only_themselves(pool: MooncakePool, other: MooncakePool) -> None:
    here, there = page(), page()
    stream = pool.subscribe([here.owner])
    other.put(there.text, b"there")
    pool.put(here.text, b"here")
    assert stream.next(10, 5.0) == [Stored(here.text, 4)]
    assert pool.batch_get([here.text, there.text]) == other.batch_get([here.text, there.text]) == [b"here", b"there"]
    assert other.lookup([here]) == [Match(here.text, False)]
    stream.close()


def test_the_peers_own_client_and_the_pool_see_the_same_bytes(master: PeerMaster, pool: MooncakePool) -> None:
    with bare_client(master) as bare:
        pool.put("by-pool", b"moonpool")
        assert bare.get("by-pool") == b"moonpool"
        assert bare.put("by-peer", b"mooncake") == 0
        assert pool.get("by-peer") == b"mooncake"


def test_pages_that_the_peers_own_client_put_are_converted_when_a_lookup_misses(
    master: PeerMaster, pool: MooncakePool
) -> None:
    source, target = model("bare-source"), model("bare-target")
    pages = random_kv(source.spec.page_shape(PAGE), 3)
    with bare_client(master) as bare:
        for key, data in zip(keys_of(source, 3 * PAGE), pages, strict=True):
            assert bare.put(key.text, bytes(data)) == 0
    wanted = keys_of(target, 3 * PAGE)
    converter = Converter(pool, config(rule(source, target, mode="on_miss")), load=lambda r, _: identity_of(r)).start()
    try:
        converter.wait_ready(10)
        assert pool.lookup(wanted, [BUNDLE]) == [None] * 3
        assert eventually(lambda: converter.stats().converted_pages == 2)
    finally:
        converter.close()
    found = pool.lookup(wanted, [BUNDLE])
    assert [m.converted if m else None for m in found] == [None, True, True]
    assert pool.batch_get([m.key for m in found if m]) == [bytes(p) for p in pages[1:]]


def test_a_watch_hears_what_others_put_and_what_was_there_before(master: PeerMaster, pool: MooncakePool) -> None:
    before, later, own = page(), page(), page()
    pool.put(before.text, b"before")
    with master.client(0, slab=MIB, watch_s=0.05) as watching:
        stream = watching.subscribe([before.owner])
        heard: list[str] = []

        def hears(key: PageKey) -> bool:
            heard.extend(event.key for event in stream.next(100, 0.1))
            return key.text in heard

        assert eventually(lambda: hears(before))
        pool.put(later.text, b"later")
        assert eventually(lambda: hears(later))
        watching.put(own.text, b"own")
        pool.put((last := page()).text, b"last")
        assert eventually(lambda: hears(last))
        assert heard.count(own.text) == 1, "told at the put, not again by the watch"


def test_the_bundled_pair_shares_its_prefill_through_the_peer(master: PeerMaster) -> None:
    """The main job: `moon-large` prefills, the converter makes `moon-small`'s pages, which answers from them."""
    _, c2c = bundled_system()
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(master.client(64 * MIB))
        converter = Converter(pool, c2c).start()
        stack.callback(converter.close)
        assert [r.state for r in converter.wait_ready(60)] == ["ready"]
        large, small = (stack.enter_context(instance(pool, c2c, name)) for name in ("moon-large", "moon-small"))
        prompt = large.encode(
            "Ada: green\nLeo: lamp\nZoe: river\nMax: tiger\nNina: violet\nOlga: stone\n" * 12 + "Ada:"
        )
        large.generate(GenerateRequest(prompt=prompt, max_tokens=1))
        assert large.flush()
        pages = len(prompt) // c2c.page_size
        assert eventually(lambda: converter.stats().converted_pages == pages - 1, timeout_s=60)
        usage = small.generate(GenerateRequest(prompt=prompt, max_tokens=1)).usage
        assert usage.native == 0
        assert usage.converted == (pages - 2) * c2c.page_size, "all whole pages but the first and the last"


def instance(pool: KVPool, c2c: C2CConfig, name: str) -> Instance:
    of = c2c.models[name]
    return Instance(of.ref, of.spec, pool, page_size=c2c.page_size, origins=lambda asked: c2c.origins(of.owner, asked))


@contextlib.contextmanager
def bare_client(master: PeerMaster) -> Iterator[Any]:
    """The peer's own client, without Moonpool."""
    from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found] # the fixture made it importable

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 4 * MIB, "tcp", "", master.rpc) == 0
    yield store
    store.close()


def test_a_cluster_that_is_full_says_so_per_key(master: PeerMaster) -> None:
    with PeerMaster() as small, small.client(16 * MIB, slab=32 * MIB) as pool:
        outcomes = pool.batch_put([f"k{i}" for i in range(5)], [bytes(5 * MIB)] * 5)
        assert outcomes[:3] == [Put.STORED] * 3
        assert [type(o) for o in outcomes[3:]] == [NoSpace, NoSpace]
        assert pool.slab.used == 0


def test_figures_of_the_cluster(pool: MooncakePool) -> None:
    before = pool.stats()
    pool.put(f"figures-{next(_names)}", bytes(MIB))
    after = pool.stats()
    assert before.capacity >= 32 * MIB
    assert (after.used - before.used, after.objects - before.objects) == (MIB, 1)


def test_replicas_are_placed_copied_moved_and_removed_on_segments(master: PeerMaster) -> None:
    with PeerMaster("--default_kv_lease_ttl=300") as two, two.client(16 * MIB) as here, two.client(16 * MIB) as there:
        names = sorted(m.name for m in here.messengers())
        assert [m.capacity for m in here.messengers()] == [16 * MIB] * 2

        def places(key: str) -> list[str]:
            return sorted(r.messenger for r in there.replicas([key])[0])

        def finish(task: str) -> str:
            assert eventually(lambda: here.task(task).state in ("done", "failed"), timeout_s=20)
            return here.task(task).state

        here.put("both", b"x", options=PutOptions(replicas=2, strict_replicas=False))
        assert places("both") == names
        here.put("one", b"12345", options=PutOptions(preferred=(names[0],)))
        assert places("one") == [names[0]]
        assert finish(here.copy("one", [names[1]])) == "done"
        assert places("one") == names
        assert eventually(lambda: here.batch_remove(["one"], messenger=names[0]) == [Removed.REMOVED])
        assert places("one") == [names[1]]
        task = here.move("one", names[0])
        assert finish(task) == "done"
        assert (here.task(task).done, places("one"), there.get("one")) == (5, [names[0]], b"12345")
        with pytest.raises(NotFound):
            here.copy("one", ["nowhere:1"])
        assert sorted(here.keys()) == ["both", "one"]
        assert here.query_by_regex("^o") == ["one"]
        assert eventually(lambda: here.remove_by_regex("^o") == 1)
        assert eventually(lambda: here.remove_all() == 1)
        assert list(there.keys()) == []


def test_closing_under_load_never_kills_the_interpreter(master: PeerMaster, pool: MooncakePool) -> None:
    victim = master.client(0, slab=8 * MIB)
    seen: list[MoonpoolError] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            while True:
                key = f"load-{rng.randrange(50)}"
                victim.batch_put([key], [key.encode() * 1000])
                for got in victim.batch_get([key, "nowhere"]):
                    assert got in (None, key.encode() * 1000)
        except PoolClosed as e:
            seen.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    assert eventually(lambda: victim.stats().hits > 200)
    victim.close()
    for t in threads:
        t.join()
    assert len(seen) == 4


def test_a_dead_master_makes_misses_and_typed_errors() -> None:
    """Each call of the peer's client takes some 4 s then, which is the peer's own time-out."""
    with PeerMaster() as master, master.client(16 * MIB) as pool:
        pool.put("k", b"v")
        master.kill()
        calls: list[Callable[[], object]] = [lambda: pool.put("new", b"v"), pool.stats]
        for call in calls:
            with pytest.raises(WireError):
                call()
        assert not pool.is_exist("k")
        assert pool.batch_get(["k"]) == [None]
        with pytest.raises(ConnectionLost):
            master.client(0)
