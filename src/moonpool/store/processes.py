"""Master and messenger as processes: config, main loop, orderly end on SIGTERM and SIGINT."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

import msgspec

from moonpool.errors import ConfigError
from moonpool.store.master.service import MasterService
from moonpool.store.messenger.publisher import Publisher
from moonpool.store.messenger.service import MessengerService
from moonpool.store.messenger.state import Limits
from moonpool.transfer.segment import Segment
from moonpool.wire import messages as m
from moonpool.wire.rpc import Server, SocketChannel

log = logging.getLogger(__name__)


class MasterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    socket: str
    expiry_s: float = 10.0
    """A messenger without a sign of life for so long is taken for dead."""


class MessengerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    socket: str
    master: str = ""
    """The master's socket; empty = alone."""
    capacity: int = 1 << 30
    """Bytes of the segment."""
    high_watermark: float = 0.95
    eviction_ratio: float = 0.05
    reservation_ttl_s: float = 60.0
    max_objects: int = 1 << 20

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


def run_master(config: MasterConfig, c2c_config: bytes = b"") -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = _stop_on_signals()
    service = MasterService(c2c_config, expiry_s=config.expiry_s)
    server = Server(config.socket, service)
    log.info("master at %s", config.socket)
    try:
        while not stop.wait(min(1.0, config.expiry_s / 4)):
            service.tick()
    finally:
        server.close()


def run_messenger(config: MessengerConfig) -> None:
    """Serve until SIGTERM or SIGINT; the segment goes with the process."""
    stop = _stop_on_signals()
    limits = config.limits()
    segment = Segment.create(config.capacity)
    service = MessengerService(segment, limits=limits)
    server = Server(config.socket, service)
    publisher = Publisher(service, config.name, config.socket, config.master) if config.master else None
    log.info("messenger %s at %s, %d B", config.name, config.socket, config.capacity)
    try:
        stop.wait()
    finally:
        service.close()
        if publisher:
            publisher.close()
        server.close()
        segment.close()


def _stop_on_signals() -> threading.Event:
    stop = threading.Event()

    def end(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    return stop


def c2c_config_of(master: str) -> bytes:
    """The config that the master at this socket serves. Raises ConnectionLost."""
    channel = SocketChannel(master)
    try:
        return channel.call(m.GetC2C(), m.C2C).config
    finally:
        channel.close()
