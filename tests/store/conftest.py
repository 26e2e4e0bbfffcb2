"""One `pool` for the contract tests: embedded, and a client of real processes. `fresh` makes pools of a given size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from moonpool.store.base import KVPool
from moonpool.store.embedded import EmbeddedPool
from moonpool.testing.cluster import LocalCluster

MIB = 1 << 20
Fresh = Callable[[int], KVPool]


def _embedded(stack: ExitStack, capacity: int) -> KVPool:
    return stack.enter_context(EmbeddedPool(capacity, c2c_config=b"{}"))


def _processes(stack: ExitStack, capacity: int) -> KVPool:
    return stack.enter_context(LocalCluster(capacity=capacity, c2c_config=b"{}")).client()


@pytest.fixture(params=["embedded", pytest.param("processes", marks=pytest.mark.cluster)])
def fresh(request: pytest.FixtureRequest) -> Iterator[Fresh]:
    make = {"embedded": _embedded, "processes": _processes}[request.param]
    with ExitStack() as stack:
        yield lambda capacity: make(stack, capacity)


@pytest.fixture(scope="module", params=["embedded", pytest.param("processes", marks=pytest.mark.cluster)])
def shared_pool(request: pytest.FixtureRequest) -> Iterator[KVPool]:
    make = {"embedded": _embedded, "processes": _processes}[request.param]
    with ExitStack() as stack:
        yield make(stack, 16 * MIB)


@pytest.fixture
def pool(shared_pool: KVPool) -> Iterator[KVPool]:
    """A pool of 16 MiB. Whatever a test leaves open is a failure."""
    yield shared_pool
    stats = shared_pool.stats()
    assert (stats.reads_open, stats.writes_open) == (0, 0)
