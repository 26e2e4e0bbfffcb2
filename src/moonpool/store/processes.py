"""Master and messenger as processes: config, main loop, orderly end on SIGTERM and SIGINT."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType

import msgspec

from moonpool.errors import ConfigError
from moonpool.store.host import MessengerHost
from moonpool.store.master.service import MasterService
from moonpool.store.messenger.disk import DiskConfig
from moonpool.store.messenger.records import Limits
from moonpool.wire import messages as m
from moonpool.wire.auth import Security, load_security, security_from_environment
from moonpool.wire.rpc import Server, Service, SocketChannel

log = logging.getLogger(__name__)

_TICK_S = 0.25
_MASTER_CONNECTIONS = 4096
"""Each messenger has two, each client one."""
_LOOK_S = 0.01


class SecurityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files; what is empty here is taken from the environment (MOONPOOL_SECRET_FILE, MOONPOOL_TLS_CERT, ...)."""

    secret_file: str = ""
    admin_secret_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_name: str = ""
    tls_mutual: bool = False

    def load(self) -> Security:
        """Raises ConfigError."""
        if self == SecurityConfig():
            return security_from_environment()
        return load_security(**msgspec.structs.asdict(self))


class MasterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    socket: str
    listen: str = ""
    """`host:port` for other machines."""
    expiry_s: float = 10.0
    """A messenger without a sign of life for so long is taken for dead."""
    quotas: dict[str, int] = {}
    """Bytes that each of these tenants may hold in the whole pool."""
    security: SecurityConfig = SecurityConfig()

    def __post_init__(self) -> None:
        if not self.expiry_s > 0:
            raise ConfigError("expiry_s must be positive", need="> 0 s", have=f"{self.expiry_s} s")


class MessengerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    socket: str
    master: str = ""
    """The master's address; empty = alone."""
    listen: str = ""
    """`host:port` for other machines, port 0 for any free one; empty: this machine only."""
    advertise: str = ""
    """The host that others are told, where it is not the one in `listen`."""
    disk: DiskConfig | None = None
    capacity: int = 1 << 30
    """Bytes of the segment."""
    prefault: bool = False
    """Take all of the segment's memory at the start, not page by page as it is first written."""
    high_watermark: float = 0.95
    eviction_ratio: float = 0.05
    reservation_ttl_s: float = 60.0
    max_objects: int = 1 << 20
    grace_s: float = 5.0
    """How long open reads and writes may go on after SIGTERM, and the disk tier take what is in memory."""
    security: SecurityConfig = SecurityConfig()

    def __post_init__(self) -> None:
        if not self.grace_s >= 0:
            raise ConfigError("grace_s must not be negative", need=">= 0 s", have=f"{self.grace_s} s")

    def limits(self) -> Limits:
        if not 0 < self.high_watermark <= 1 or not 0 <= self.eviction_ratio < self.high_watermark:
            raise ConfigError(
                "bad eviction limits",
                key=self.name,
                need="0 <= eviction_ratio < high_watermark <= 1",
                have=f"{self.eviction_ratio}, {self.high_watermark}",
            )
        if self.reservation_ttl_s <= 0 or self.max_objects < 1:
            raise ConfigError("reservation_ttl_s and max_objects must be positive", key=self.name)
        return Limits(
            high_watermark=self.high_watermark,
            eviction_ratio=self.eviction_ratio,
            reservation_ttl_s=self.reservation_ttl_s,
            max_objects=self.max_objects,
        )


def run_master(
    config: MasterConfig,
    c2c_config: bytes = b"",
    *,
    beside: Callable[[MasterService], AbstractContextManager[object]] | None = None,
    meter: Callable[[Service], Service] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. `beside` runs along with it (metrics), from before the first request; `meter` goes around the
    service as its clients see it."""
    stop = _Stop()
    security = config.security.load()
    service = MasterService(c2c_config, expiry_s=config.expiry_s, quotas=config.quotas)
    places = [config.socket, *([config.listen] if config.listen else [])]
    shown = meter(service) if meter else service
    with beside(service) if beside else nullcontext():
        server = Server(places, shown, security=security, name="master", max_connections=_MASTER_CONNECTIONS)
        log.info("master at %s", ", ".join(map(str, server.addresses)))
        try:
            while not stop.wait(min(_TICK_S, config.expiry_s / 4)):
                service.tick()
        finally:
            server.close()


def run_messenger(
    config: MessengerConfig,
    *,
    beside: Callable[[MessengerHost], AbstractContextManager[object]] | None = None,
    meter: Callable[[Service], Service] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; the segment goes with the process. `beside` and `meter` as in `run_master`.

    SIGTERM takes nothing new and lets open reads and writes go on for `grace_s`; SIGINT ends at once. A second signal kills.
    """
    stop = _Stop()
    host = MessengerHost(
        name=config.name,
        socket=config.socket,
        capacity=config.capacity,
        prefault=config.prefault,
        master=config.master,
        listen=config.listen,
        advertise=config.advertise,
        disk=config.disk,
        limits=config.limits(),
        security=config.security.load(),
        meter=meter,
    )
    try:
        with beside(host) if beside else nullcontext():
            log.info(
                "messenger %s at %s, %d B in %s",
                config.name,
                ", ".join(map(str, host.server.addresses)),
                config.capacity,
                host.segment.pages(),
            )
            while not stop.wait(_TICK_S):  # not without end: a signal just before the wait is heard only after it
                pass
            if stop.gently:
                _finish(host, config.grace_s)
    finally:
        host.close()
    log.info("messenger %s has left", config.name)


def _finish(host: MessengerHost, grace_s: float) -> None:
    """Take nothing new, wait for what is open, and write the rest to the disk tier, all within `grace_s`."""
    host.service.drain(True)
    log.info("messenger %s is leaving", host.info().name)
    end = time.monotonic() + grace_s
    while (open_ := host.service.stats().reads_open + host.service.stats().writes_open) and time.monotonic() < end:
        time.sleep(_LOOK_S)
    if open_:
        log.warning("%d reads and writes did not end within %g s", open_, grace_s)
    if not host.service.spill_all(max(0.0, end - time.monotonic())):
        log.warning("not all objects were written to disk within %g s", grace_s)


class _Stop(threading.Event):
    """Set by the first SIGTERM or SIGINT; the next one has its usual effect, which is the end."""

    def __init__(self) -> None:
        super().__init__()
        self.gently = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    def _end(self, number: int, _frame: FrameType | None) -> None:
        self.gently = number == signal.SIGTERM
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        self.set()


def c2c_config_of(master: str) -> bytes:
    """The config that the master at this socket serves. Raises ConnectionLost."""
    channel = SocketChannel(master)
    try:
        return channel.call(m.GetC2C(), m.C2C).config
    finally:
        channel.close()
