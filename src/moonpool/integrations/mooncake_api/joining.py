"""How a store gets into a pool: with a segment of its own (a messenger in this process), or as a client of others'."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Protocol

from moonpool.errors import ConfigError, DeadlineExceeded, MoonpoolError
from moonpool.integrations.mooncake_api import names
from moonpool.integrations.mooncake_api.codes import refused
from moonpool.integrations.mooncake_api.config import parse_size
from moonpool.integrations.mooncake_api.empty import EmptyPool
from moonpool.integrations.mooncake_api.settings import Settings
from moonpool.store.base import KVPool
from moonpool.store.client import PoolClient
from moonpool.store.messenger.disk import DiskConfig
from moonpool.store.node import Node
from moonpool.types import MessengerInfo
from moonpool.wire import address as addresses
from moonpool.wire import messages as m
from moonpool.wire.auth import Security, security_from_environment
from moonpool.wire.rpc import SocketChannel

log = logging.getLogger(__name__)

_ATTEMPTS = 20
_RETRY_S = 1.0
_MASTER_S = 2.5
"""Seconds that a master has to answer."""
_POLL_S = 0.01


class Segment(Protocol):
    """Capacity that this process gives."""

    def close(self) -> None: ...


class Joined:
    """An open store's place in a pool. `connect` gives the pool, or None as long as it has no messenger; `owned`: it is closed
    with this."""

    def __init__(
        self,
        name: str,
        local_buffer_size: int,
        connect: Callable[[], KVPool | None],
        add_segment: Callable[[int], Segment] | None = None,
        *,
        owned: bool = False,
    ) -> None:
        self.name, self.local_buffer_size = name, local_buffer_size
        self._connect, self._add, self._owned = connect, add_segment, owned
        self._lock = threading.Lock()
        self._leave = contextlib.ExitStack()
        self._tried = time.monotonic()
        self._pool = connect() or EmptyPool()

    @property
    def pool(self) -> KVPool:
        """A client that came before the first messenger looks for one again, at most once a second."""
        if isinstance(self._pool, EmptyPool):
            with self._lock:
                if time.monotonic() - self._tried > _RETRY_S:
                    self._tried = time.monotonic()
                    self._pool = self._connect() or self._pool
        return self._pool

    def add_segment(self, capacity: int) -> Segment:
        """Raises ConfigError, WireError."""
        if self._add is None:
            raise ConfigError("this store cannot have segments", key=self.name)
        return self._add(capacity)

    def health(self) -> int:
        """0, or 2 if no master answers: the codes of `health_check`."""
        try:
            self.pool.messengers()
        except MoonpoolError as e:
            refused("health_check", e)
            return 2
        return 0

    def on_close(self, end: Callable[[], object]) -> None:
        self._leave.callback(end)

    def close(self) -> None:
        """Leave the pool. Twice is safe."""
        if self._owned:
            self._pool.close()
        self._leave.close()


def join_pool(settings: Settings) -> Joined:
    """Raises ConfigError for what is wrong with the settings, WireError if the master does not answer."""
    way = _Way(settings)
    if settings.global_segment_size:
        own = way.own_segment()
        joined = Joined(own.name, settings.local_buffer_size, lambda: own.pool, way.more_segments(own.name))
        joined.on_close(own.close)
    else:
        name = names.join(way.host, way.port or names.free_port())
        joined = Joined(name, settings.local_buffer_size, way.client, way.more_segments(name), owned=True)
    if settings.enable_client_http_server:
        _serve_pages(joined, settings.client_http_port)
    return joined


class _Way:
    """What all that one store has in a pool shares: the master, who it is, and its secrets."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._security = security_from_environment()
        self._master = str(addresses.parse(settings.master_server_addr))
        self._tenant = "" if settings.tenant_id == "default" else settings.tenant_id
        self.host, self.port = names.split(settings.local_hostname)
        self._bind = bind_host(self.host, self._security)
        messengers_of(self._master, self._security)  # raises now, in place of a segment that nobody ever finds

    def client(self) -> KVPool | None:
        if not messengers_of(self._master, self._security):
            return None
        return PoolClient.connect(self._master, tenant=self._tenant, security=self._security)

    def own_segment(self) -> Node:
        """The messenger that the store is named after. A port that the caller named is taken or is an error; else any free one."""
        s = self._settings
        disk = disk_at(s.ssd_offload_path) if s.enable_ssd_offload else None
        for _ in range(_ATTEMPTS):
            port = self.port or names.free_port()
            try:
                return self._node(
                    s.global_segment_size, names.join(self.host, port), 0 if s.shares_engine else port, disk
                )
            except ConfigError as e:
                if self.port or names.is_free(port):
                    raise
                refusal = e  # somebody was faster
        raise refusal

    def more_segments(self, name: str) -> Callable[[int], Segment]:
        """`add(capacity)`; they are `name#1`, `name#2` and so on."""
        numbers = count(1)
        return lambda capacity: self._node(capacity, f"{name}#{next(numbers)}", 0, None)

    def _node(self, capacity: int, name: str, port: int, disk: DiskConfig | None) -> Node:
        node = Node(
            self._master,
            name=name,
            capacity=capacity,
            listen=names.join(self._bind, port),
            tenant=self._tenant,
            disk=disk,
            security=self._security,
        )
        try:
            self._await_known(name)
        except BaseException:
            node.close()
            raise
        return node

    def _await_known(self, name: str) -> None:
        """A set-up store is one that others see. Raises DeadlineExceeded if the master does not list it in time."""
        deadline = time.monotonic() + _MASTER_S
        while all(info.name != name for info in messengers_of(self._master, self._security)):
            if time.monotonic() > deadline:
                raise DeadlineExceeded("the master does not list this segment", key=name, have=self._master)
            time.sleep(_POLL_S)


def _serve_pages(joined: Joined, port: int) -> None:
    """Health and figures of this store over HTTP. Raises ConfigError if the port is taken."""
    from moonpool.integrations.mooncake_api import http_front, http_pages  # only who wants pages pays for a web server

    try:
        app = http_pages.client_app(joined.health, lambda: joined.pool.messengers())
        joined.on_close(http_front.HttpThread(app, "127.0.0.1", port, "client metrics").close)
    except BaseException:
        joined.close()
        raise


def messengers_of(master: str, security: Security) -> list[MessengerInfo]:
    """Who belongs to the pool. Raises WireError with the address and the cause, within 3 s."""
    channel = SocketChannel(master, _MASTER_S, security=security)
    try:
        return channel.call(m.ListMessengers(), m.Messengers).messengers
    finally:
        channel.close()


def bind_host(host: str, security: Security) -> str:
    """Where to listen: where the name leads if there is a secret, else on loopback, whatever the name."""
    if security.secret is not None:
        return host
    if not addresses.is_loopback(addresses.TcpAddress(host, 0)):
        log.warning("%s: without a secret this segment serves this machine only. Set MOONPOOL_SECRET_FILE.", host)
    return "127.0.0.1"


def disk_at(folder: str) -> DiskConfig:
    """Bounded by MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES, or else by 80 % of what is free. Raises ConfigError."""
    limit = os.environ.get("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", "")
    try:
        capacity = parse_size(limit) if limit else int(shutil.disk_usage(_existing(folder)).free * 0.8)
    except (ValueError, OSError) as e:
        raise ConfigError(f"cannot tell the disk's size: {e}", key="ssd_offload_path", have=folder) from e
    return DiskConfig(folder=folder, capacity=capacity)


def _existing(folder: str) -> Path:
    """The folder, or the nearest one above it that is there."""
    path = Path(folder).absolute()
    return next(p for p in (path, *path.parents) if p.is_dir())
