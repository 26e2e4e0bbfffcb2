"""B: identity. Whatever one tenant does, another one's keys of the same name do not notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moonpool.keys import PageKey
from moonpool.store.base import Reservation
from moonpool.store.client import PoolClient
from moonpool.store.embedded import EmbeddedPool
from moonpool.store.links import MessengerLink
from moonpool.testing.leaks import no_leaks
from moonpool.types import Pin, Put, PutOptions
from moonpool.wire.rpc import LocalChannel

PAGE = PageKey("a" * 32, 0, "0" * 32)


def of_tenant(pool: EmbeddedPool, tenant: str) -> PoolClient:
    return PoolClient(lambda: MessengerLink.mapped(LocalChannel(pool.service), tenant), tenant=tenant)


def _reserve(pool: PoolClient) -> None:
    [r] = pool.reserve([("k", 3)])
    assert isinstance(r, Reservation), "another tenant's reservation of this key is no obstacle"
    pool.revoke([r])


VERBS: dict[str, Callable[[PoolClient], object]] = {
    "put": lambda pool: pool.put("k", b"other"),
    "replace": lambda pool: pool.put("k", b"other", PutOptions(replace=True)),
    "reserve and revoke": _reserve,
    "remove": lambda pool: pool.remove("k", force=True),
    "remove_all": lambda pool: pool.remove_all(force=True),
    "remove_by_regex": lambda pool: pool.remove_by_regex(".*", force=True),
    "get": lambda pool: pool.batch_get(["k"]) == [None] or pytest.fail("read another tenant's object"),
    "lookup": lambda pool: pool.lookup([PAGE]) == [None] or pytest.fail("saw another tenant's page"),
    "exist": lambda pool: pool.batch_is_exist(["k"]) == [False] or pytest.fail("saw another tenant's key"),
    "sizes": lambda pool: pool.sizes(["k"]) == [None] or pytest.fail("saw another tenant's size"),
    "keys": lambda pool: list(pool.keys()) == [] or pytest.fail("listed another tenant's keys"),
    "open and close": lambda pool: pool.open_read(["k"]).close(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_of_one_tenant_reaches_another_ones_key(verb: str) -> None:
    """B2"""
    with no_leaks(), EmbeddedPool(1 << 20) as pool, of_tenant(pool, "s1") as mine, of_tenant(pool, "s2") as other:
        mine.put("k", b"mine", PutOptions(pin=Pin.HARD))
        mine.put(PAGE.text, b"page")
        [writing] = mine.reserve([("being written", 4)])
        with mine.open_read(["k"]) as lease:
            VERBS[verb](other)
            assert bytes(lease.views[0] or b"") == b"mine"
        assert isinstance(writing, Reservation)
        assert mine.commit([writing]) == [Put.STORED]
        assert mine.get("k") == b"mine"
        assert mine.get(PAGE.text) == b"page"
        stats = pool.stats()
        assert (stats.reads_open, stats.writes_open) == (0, 0)
