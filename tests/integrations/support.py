"""Stores over the fake cluster, and memory to point at."""

from __future__ import annotations

import ctypes
from typing import Any

from moonpool.integrations.mooncake_api.store import MooncakeDistributedStore
from tests.integrations.fakes import FakeCluster, FakePool

HOME, OTHER = "localhost:12300", "localhost:12301"


def store_on(cluster: FakeCluster, name: str = HOME) -> MooncakeDistributedStore:
    return MooncakeDistributedStore.over(FakePool(cluster, name), name)


class Block:
    """Memory with an address. `text` reads it, `fill` writes it."""

    def __init__(self, content: bytes | int) -> None:
        self._array: Any = (
            ctypes.create_string_buffer(content)
            if isinstance(content, int)
            else ctypes.create_string_buffer(content, len(content))
        )
        self.size = len(self._array)
        self.ptr = ctypes.addressof(self._array)

    @property
    def text(self) -> bytes:
        return bytes(self._array)
