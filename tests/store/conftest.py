"""One `pool` for the contract tests: Moonpool's own (embedded, and a client of real processes), or with `--pool=mooncake` a
client of the real Mooncake Store. `fresh` makes pools of a given size. A test that a pool cannot pass is marked
`needs("ability")`: what is lacking is declared in `moonpool.store.mooncake.limits.Cannot`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from moonpool.store.base import KVPool
from moonpool.store.embedded import EmbeddedPool
from moonpool.store.mooncake.limits import Cannot
from moonpool.testing.cluster import LocalCluster
from tests.store.peer import PeerMaster

MIB = 1 << 20
Fresh = Callable[[int], KVPool]


def _embedded(stack: ExitStack, capacity: int) -> KVPool:
    return stack.enter_context(EmbeddedPool(capacity, c2c_config=b"{}"))


def _processes(stack: ExitStack, capacity: int) -> KVPool:
    return stack.enter_context(LocalCluster(capacity=capacity, c2c_config=b"{}")).client()


def _mooncake(stack: ExitStack, capacity: int) -> KVPool:
    """With a master of its own: objects of one cluster are seen by, and may lie with, any of its clients. `capacity` bounds the
    slab; the peer lends no less than 16 MiB."""
    master = stack.enter_context(PeerMaster())
    return stack.enter_context(master.client(max(capacity, 16 * MIB), slab=capacity, c2c_config=b"{}"))


_MAKE = {"embedded": _embedded, "processes": _processes, "mooncake": _mooncake}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pool_kind" in metafunc.fixturenames:
        own = ["embedded", pytest.param("processes", marks=pytest.mark.cluster)]
        kinds = (
            [pytest.param("mooncake", marks=pytest.mark.cluster)]
            if metafunc.config.getoption("--pool") == "mooncake"
            else own
        )
        metafunc.parametrize("pool_kind", kinds, scope="module")


@pytest.fixture(autouse=True)
def _needs(request: pytest.FixtureRequest) -> None:
    """Skips what the chosen pool declares that it cannot; an ability that nobody ever declared is an error of the test."""
    lacking = [Cannot[mark.args[0].upper()] for mark in request.node.iter_markers("needs")]
    if lacking and request.config.getoption("--pool") == "mooncake":
        pytest.skip(lacking[0].value)


@pytest.fixture
def fresh(pool_kind: str) -> Iterator[Fresh]:
    with ExitStack() as stack:
        yield lambda capacity: _MAKE[pool_kind](stack, capacity)


@pytest.fixture(scope="module")
def shared_pool(pool_kind: str) -> Iterator[KVPool]:
    with ExitStack() as stack:
        yield _MAKE[pool_kind](stack, 16 * MIB)


@pytest.fixture
def pool(shared_pool: KVPool) -> Iterator[KVPool]:
    """A pool of 16 MiB. Whatever a test leaves open is a failure."""
    yield shared_pool
    stats = shared_pool.stats()
    assert (stats.reads_open, stats.writes_open) == (0, 0)
