"""`async_<call>` for each call of the store."""

from __future__ import annotations

import asyncio
import threading

import pytest

from moonpool.integrations.mooncake_api.async_store import MooncakeDistributedStoreAsync


class Store(MooncakeDistributedStoreAsync):
    """Has two calls of its own, that tell where they ran and whether they ran together."""

    def __init__(self) -> None:
        super().__init__()
        self.together = threading.Barrier(2, timeout=10)

    def where(self, first: int, *, second: int = 0) -> tuple[int, int, int]:
        """Says so."""
        return first, second, threading.get_ident()

    def meet(self) -> int:
        return self.together.wait()


def test_runs_in_another_thread_with_all_arguments() -> None:
    first, second, thread = asyncio.run(Store().async_where(1, second=2))
    assert (first, second) == (1, 2)
    assert thread != threading.get_ident()


def test_calls_run_side_by_side() -> None:
    store = Store()

    async def both() -> list[int]:
        return await asyncio.gather(store.async_meet(), store.async_meet())

    assert sorted(asyncio.run(both())) == [0, 1]


def test_the_peers_calls_are_there_and_answer_as_without_a_loop() -> None:
    store = Store()
    assert asyncio.run(store.async_get("k")) == b""
    assert asyncio.run(store.async_batch_get_tensor(["k"])) == [None]
    assert store.get("k") == b""


def test_there_is_nothing_else() -> None:
    store = Store()
    for name in ("async_nothing", "async_", "nothing", "async_together", "async_async_get"):
        with pytest.raises(AttributeError, match=name):
            getattr(store, name)
    assert store.async_where.__doc__ == "Says so."
