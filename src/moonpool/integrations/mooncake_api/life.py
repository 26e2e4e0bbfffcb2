"""A store's life: set up, registered memory, health, close. A store that is not open refuses every call with a code."""

from __future__ import annotations

import logging
import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any, Self

from moonpool.errors import ConfigError, PoolClosed
from moonpool.integrations.mooncake_api import dummy, settings
from moonpool.integrations.mooncake_api.codes import coded, told
from moonpool.integrations.mooncake_api.joining import Joined, join_pool
from moonpool.integrations.mooncake_api.memory import MemoryPool, Ranges
from moonpool.store.base import KVPool

log = logging.getLogger(__name__)


class Life:
    def __init__(self) -> None:
        self.local_buffer_size = 0
        """Bytes that the set-up gave for values; 0 before it."""
        self.segment = ""
        """This store's name, and that of its segment; "" while it is not open."""
        self._lock = threading.Lock()
        self._joined: Joined | None = None
        self._ranges = Ranges()
        self._memory = MemoryPool(1)
        self._end: weakref.finalize[Any, Any] | None = None

    # -- setting up

    @told
    def setup(self, *args: Any, **kwargs: Any) -> int:
        """`setup(local_hostname, metadata_server, global_segment_size, local_buffer_size, protocol, rdma_devices,
        master_server_addr, engine=None, enable_ssd_offload=False, ssd_offload_path="", tenant_id="default",
        enable_client_http_server=False, client_http_port=9300)`, or `setup(config)` with a dict of the same names.

        0, or why not: -600 for a bad setting (the log names it), -900 if no master answers (within 3 s).
        """
        return self._open_with(lambda: join_pool(_settings(*args, **kwargs)))

    @told
    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Join through the `mooncake_client` process at this address, which must be on this host. Needs no segment of its own.

        `mem_pool_size`: bytes for `alloc_from_mem_pool`.
        """
        memory = MemoryPool(max(1, operator.index(mem_pool_size)))
        code = self._open_with(lambda: dummy.join(server_address, operator.index(local_buffer_size)))
        if code == 0:
            self._memory = memory
        return code

    @told
    def init_all(self, protocol: str, device_name: str, mount_segment_size: int = 16 << 20) -> int:
        """`setup` with the defaults of one machine: a segment of `mount_segment_size` bytes, the master at its usual place."""
        master = settings.DEFAULT_MASTER
        return self.setup("localhost", "P2PHANDSHAKE", mount_segment_size, 16 << 20, protocol, device_name, master)

    def _open_with(self, join: Callable[[], Joined]) -> int:
        with self._lock:
            if self._joined is not None:
                raise ConfigError("the store is set up already", key=self.segment, fix="Call close() first.")
            joined = join()
            self._joined = joined
            self.segment, self.local_buffer_size = joined.name, joined.local_buffer_size
            self._end = weakref.finalize(self, joined.close)  # a store that is dropped or outlives its process's main
        log.info("%s: set up", joined.name)
        return 0

    @classmethod
    def over(cls, pool: KVPool, name: str = "localhost:12300", *, local_buffer_size: int = 16 << 20) -> Self:
        """A store over a pool that is open already, and stays open when the store is closed."""
        store = cls()
        store._open_with(lambda: Joined(name, local_buffer_size, lambda: pool))
        return store

    # -- state

    @property
    def is_open(self) -> bool:
        return self._joined is not None

    @property
    def pool(self) -> KVPool:
        """Raises PoolClosed if the store is not set up."""
        return self._joined_open().pool

    def get_hostname(self) -> str:
        """`host:port`; "" if the store is not open."""
        return self.segment

    def health_check(self) -> int:
        """0 healthy, 1 not set up or closed, 2 no master answers."""
        joined = self._joined
        return joined.health() if joined is not None else 1

    def close(self) -> int:
        """Leave the pool; the objects in this store's own segment go with it. 0, also when called again."""
        with self._lock:
            if self._joined is not None:
                self._closing()
            end, self._end, self._joined = self._end, None, None
            self.segment, self.local_buffer_size = "", 0
            self._ranges.clear()
        if end is not None:
            end()
        return 0

    def _closing(self) -> None:
        """For what parts of the store hold open, while the pool still is."""

    def _joined_open(self) -> Joined:
        if self._joined is None:
            raise PoolClosed("the store is not set up", fix="Call setup() and look at what it returns.")
        return self._joined

    # -- memory

    @coded
    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """0, or -600 for a size of 0 and for memory that overlaps registered memory.

        Puts and gets take any memory; ranged reads keep inside what is registered.
        """
        self.pool  # noqa: B018 - refuses if the store is not open
        self._ranges.add(buffer_ptr, size)
        return 0

    @coded
    def unregister_buffer(self, buffer_ptr: int) -> int:
        """0, or -600 if no registered range starts there."""
        self._ranges.remove(buffer_ptr)
        return 0

    def alloc_from_mem_pool(self, size: int) -> int:
        """Address of `size` bytes of the pool that `setup_dummy` made, valid while this store exists; 0 if none are left."""
        return self._memory.alloc(operator.index(size))


def _settings(*args: Any, **kwargs: Any) -> settings.Settings:
    config = (
        args[0] if len(args) == 1 and not kwargs else kwargs.get("config") if not args and len(kwargs) == 1 else None
    )
    if isinstance(config, dict):
        return settings.from_dict(config)
    return settings.setup(*args, **kwargs)
