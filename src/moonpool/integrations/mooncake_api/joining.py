"""How a store gets into a pool: with a segment of its own (a messenger in this process), or as a client of others'."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable
from itertools import count
from typing import Protocol

from moonpool.errors import ConfigError
from moonpool.integrations.mooncake_api import names
from moonpool.integrations.mooncake_api.config import parse_size
from moonpool.integrations.mooncake_api.settings import Settings
from moonpool.store.base import KVPool
from moonpool.store.client import PoolClient
from moonpool.store.messenger.disk import DiskConfig
from moonpool.store.node import Node
from moonpool.wire import address as addresses
from moonpool.wire.auth import Security, security_from_environment

log = logging.getLogger(__name__)

_ATTEMPTS = 20
_MASTER_S = 2.5
"""Seconds that a master has to answer; the peer waits for 90."""


class Segment(Protocol):
    """Capacity that this process gives."""

    def close(self) -> None: ...


class Joined:
    """An open store's place in a pool."""

    def __init__(
        self,
        name: str,
        local_buffer_size: int,
        connect: Callable[[], KVPool],
        add: Callable[[int], Segment] | None = None,
    ) -> None:
        self.name, self.local_buffer_size = name, local_buffer_size
        self._connect, self._add = connect, add
        self._lock = threading.Lock()
        self._pool: KVPool | None = None
        self._leave = contextlib.ExitStack()

    @property
    def pool(self) -> KVPool:
        """Raises NotEnoughMessengers as long as there is none: a client may come before the first one."""
        pool = self._pool
        if pool is None:
            with self._lock:
                if self._pool is None:
                    self._pool = self._connect()
                    self._leave.callback(self._pool.close)
                pool = self._pool
        return pool

    @staticmethod
    def over(pool: KVPool, name: str, local_buffer_size: int) -> Joined:
        """On a pool that is open, and that stays open."""
        joined = Joined(name, local_buffer_size, lambda: pool)
        joined._pool = pool
        return joined

    def add_segment(self, capacity: int) -> Segment:
        """Raises ConfigError, WireError."""
        if self._add is None:
            raise ConfigError("this store cannot have segments", key=self.name)
        return self._add(capacity)

    def on_close(self, end: Callable[[], object]) -> None:
        self._leave.callback(end)

    def close(self) -> None:
        """Leave the pool. Twice is safe."""
        self._leave.close()


def join_pool(settings: Settings) -> Joined:
    """Raises ConfigError for what is wrong with the settings, WireError if the master does not answer."""
    security = security_from_environment()
    master = str(addresses.parse(settings.master_server_addr))
    check_master(master, security)
    tenant = "" if settings.tenant_id == "default" else settings.tenant_id
    host, port = names.split(settings.local_hostname)
    extra = count(1)

    def node(capacity: int, name: str, listen: str) -> Node:
        disk = _disk(settings)
        return Node(master, name=name, capacity=capacity, listen=listen, tenant=tenant, disk=disk, security=security)

    def client() -> KVPool:
        return PoolClient.connect(master, tenant=tenant, security=security)

    def segment(capacity: int) -> Segment:
        return node(capacity, f"{name}#{next(extra)}", f"{_bind_host(host, security)}:0")

    if not settings.global_segment_size:
        name = names.join(host, port or names.free_port())
        return Joined(name, settings.local_buffer_size, client, segment)
    own = _own_node(node, settings, host, port, security)
    name = own.name
    joined = Joined(name, settings.local_buffer_size, lambda: own.pool, segment)
    joined.on_close(own.close)
    return joined


def check_master(address: str, security: Security) -> None:
    """Raises WireError that names the address and the cause, within 3 s."""


def _own_node(
    node: Callable[[int, str, str], Node], settings: Settings, host: str, port: int | None, security: Security
) -> Node:
    """The messenger that holds this store's segment. A port that the caller named is taken or is an error; else any free one."""
    bind = _bind_host(host, security)
    for _ in range(_ATTEMPTS):
        chosen = port or names.free_port()
        listen = names.join(bind, 0 if settings.shares_engine else chosen)
        try:
            return node(settings.global_segment_size, names.join(host, chosen), listen)
        except ConfigError as e:
            if port or "port" not in e.what:
                raise
            refusal = e  # somebody was faster
    raise refusal


def _bind_host(host: str, security: Security) -> str:
    """Where to listen: where the name leads if there is a secret, else on loopback, whatever the name."""
    if security.secret is not None:
        return host
    if not addresses.is_loopback(addresses.TcpAddress(host, 0)):
        log.warning("%s: without a secret this segment serves this machine only. Set MOONPOOL_SECRET_FILE.", host)
    return "127.0.0.1"


def _disk(settings: Settings) -> DiskConfig | None:
    if not settings.enable_ssd_offload:
        return None
    folder = settings.ssd_offload_path
    limit = os.environ.get("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", "")
    try:
        capacity = parse_size(limit) if limit else int(shutil.disk_usage(_existing(folder)).free * 0.8)
    except (ValueError, OSError) as e:
        raise ConfigError(f"cannot tell the disk's size: {e}", key="ssd_offload_path", have=folder) from e
    return DiskConfig(folder=folder, capacity=capacity)


def _existing(folder: str) -> str:
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder.rstrip("/"))
    return folder or "."
