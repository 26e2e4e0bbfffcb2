"""The peer's store behind a guard: it kills the interpreter when it is used before `setup` or after `close`, so it never is.

Every use is counted; `close` refuses new ones and waits for those under way. Pointers and byte counts only go in: the peer takes an
array's count of elements for its count of bytes and would silently store a part.
"""

from __future__ import annotations

import importlib
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from moonpool.errors import ConfigError, ConnectionLost, PoolClosed, PoolError
from moonpool.store.mooncake.config import MooncakeConfig, host_and_port, size_of

PACKAGE = "mooncake-transfer-engine-non-cuda"


class Store(Protocol):
    """What is used of `mooncake.store.MooncakeDistributedStore`. Results stand per key: 0 or more, or a negative code."""

    def register_buffer(self, ptr: int, size: int, /) -> int: ...
    def unregister_buffer(self, ptr: int, /) -> int: ...
    def batch_is_exist(self, keys: list[str], /) -> list[int]: ...
    def batch_get_replica_desc(self, keys: list[str], /) -> dict[str, list[Any]]: ...
    def get_size(self, key: str, /) -> int: ...
    def batch_put_from(
        self, keys: list[str], ptrs: list[int], sizes: list[int], config: Any = ..., /
    ) -> Sequence[int]: ...
    def batch_get_into(self, keys: list[str], ptrs: list[int], sizes: list[int], /) -> Sequence[int]: ...
    def batch_remove(self, keys: list[str], force: bool = ..., /) -> Sequence[int]: ...
    def batch_replica_clear(self, keys: list[str], segment: str, /) -> list[str]: ...
    def remove_all(self, force: bool = ..., /) -> int: ...
    def create_copy_task(self, key: str, targets: list[str], /) -> tuple[tuple[int, int], int]: ...
    def create_move_task(self, key: str, source: str, target: str, /) -> tuple[tuple[int, int], int]: ...
    def query_task(self, task: tuple[int, int], /) -> tuple[Any, int]: ...
    def close(self) -> int: ...


class PeerStore:
    """A store that was set up. `module` is the peer's, for its `ReplicateConfig` and enums."""

    def __init__(self, store: Store, module: Any) -> None:
        self._store: Store | None = store
        self.module = module
        self._uses = 0
        self._changed = threading.Condition()

    def check_open(self) -> None:
        """Raises PoolClosed."""
        if self._store is None:
            raise PoolClosed("the pool is closed")

    @contextmanager
    def use(self) -> Iterator[Store]:
        """The store, which stays open until the block ends. Raises PoolClosed."""
        with self._changed:
            store = self._store
            if store is None:
                raise PoolClosed("the pool is closed")
            self._uses += 1
        try:
            yield store
        finally:
            with self._changed:
                self._uses -= 1
                self._changed.notify_all()

    def register(self, address: int, size: int) -> None:
        with self.use() as store:
            code = store.register_buffer(address, size)
        if code:
            raise PoolError("the peer does not register the slab", need=f"{size} B", have=f"code {code}")

    def close(self, *addresses: int) -> None:
        """Wait for uses under way, unregister, close. Idempotent."""
        with self._changed:
            store, self._store = self._store, None
            self._changed.wait_for(lambda: not self._uses)
        if store:
            for address in addresses:
                store.unregister_buffer(address)
            store.close()


def connect(config: MooncakeConfig) -> PeerStore:
    """A store that is set up. Raises ConfigError without the package, ConnectionLost without a master."""
    module = _module()
    _probe(config)
    store = module.MooncakeDistributedStore()
    code = store.setup(
        config.local_hostname,
        config.metadata_server,
        size_of(config.global_segment_size, "global_segment_size"),
        size_of(config.local_buffer_size, "local_buffer_size"),
        config.protocol,
        config.device_name,
        config.master_server_address,
        enable_ssd_offload=config.enable_ssd_offload,
        ssd_offload_path=config.ssd_offload_path,
        tenant_id=config.tenant_id,
    )
    if code:
        raise ConnectionLost(
            "the peer's setup failed",
            key=config.master_server_address,
            have=f"code {code}",
            fix="Its log on stderr says why: metadata_server, protocol and device_name are the usual causes.",
        )
    return PeerStore(store, module)


def _module() -> Any:
    try:
        module = importlib.import_module("mooncake.store")
    except ImportError as e:
        raise ConfigError(
            "the existing engine's package cannot be imported",
            need=f"`pip install {PACKAGE}`",
            have=str(e),
            fix="If it is libibverbs.so.1 that is missing: `apt install libibverbs1`, also on machines without RDMA.",
        ) from e
    if module.MooncakeDistributedStore.__module__.startswith("moonpool."):
        raise ConfigError(
            "`mooncake.store` is Moonpool's own drop-in here, not the existing engine",
            fix="Run without `python -m moonpool.integrations.mooncake_api`.",
        )
    return module


def _probe(config: MooncakeConfig) -> None:
    """The peer itself takes 90 s to say that nobody listens. An elected master (`etcd://`) is left to it."""
    address = config.master_server_address
    if "://" in address:
        return
    try:
        socket.create_connection(host_and_port(address, "master_server_address"), config.timeout_s).close()
    except OSError as e:
        raise ConnectionLost(
            "no master answers",
            key=address,
            have=e.strerror or str(e),
            fix="Start mooncake_master, or mend the address.",
        ) from e
