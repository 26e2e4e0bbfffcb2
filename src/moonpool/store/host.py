"""One messenger with everything around it: segment, disk tier, sockets, and the threads that tell the master and copy objects.

`run_messenger` is a process that is just this; `node.Node` is this inside a process that also is a client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from moonpool.clock import Clock
from moonpool.store.links import MessengerLink
from moonpool.store.messenger.data import DataConnections
from moonpool.store.messenger.disk import DiskConfig, DiskTier
from moonpool.store.messenger.publisher import Publisher
from moonpool.store.messenger.records import Limits
from moonpool.store.messenger.service import MessengerService
from moonpool.store.messenger.tasks import Tasks
from moonpool.store.peers import host_id, reach
from moonpool.transfer.registry import Registry
from moonpool.transfer.segment import Segment
from moonpool.transfer.server import TransferServer
from moonpool.types import MessengerInfo
from moonpool.wire import address as addresses
from moonpool.wire.auth import Security
from moonpool.wire.rpc import Channel, Server, Service, SocketChannel

log = logging.getLogger(__name__)

_MASTER_S = 5.0


class MessengerHost:
    """Serves from construction to `close`."""

    def __init__(
        self,
        *,
        name: str,
        socket: str,
        capacity: int,
        prefault: bool = False,
        master: str = "",
        listen: str = "",
        advertise: str = "",
        disk: DiskConfig | None = None,
        limits: Limits | None = None,
        security: Security = Security(),
        clock: Clock | None = None,
        meter: Callable[[Service], Service] | None = None,
    ) -> None:
        """`listen`: `host:port` for other machines, port 0 for any; `advertise`: the host that they are told, where it differs;
        `meter` goes around the service as clients of the sockets see it.

        Raises ConfigError (an address is taken or open without a secret; the memory cannot be had), DiskError.
        """
        self._undo: list[Callable[[], None]] = []
        self._publisher: Publisher | None = None
        try:
            self.segment = self._until_close(Segment.create(capacity))
            if prefault:
                self.segment.populate()
            tier = DiskTier.open(disk, clock=clock) if disk and clock else DiskTier.open(disk) if disk else None
            registry = Registry()
            self._undo.append(registry.close)
            region = (
                registry.register(self.segment.view, name=name, fd=-1 if self.segment.huge else self.segment.fd)
                if listen
                else None
            )
            limits = limits or Limits(changes_kept=1 << 16 if master else 0)
            self.service = MessengerService(
                self.segment, name=name, clock=clock, limits=limits, disk=tier, region=region
            )
            self._undo.append(self.service.close)
            if listen:
                self.service.data = DataConnections(TransferServer(registry))
            self.server = Server(
                [socket, *([listen] if listen else [])],
                meter(self.service) if meter else self.service,
                security=security,
                handlers={"data": self.service.data.serve} if self.service.data else {},
                name=f"messenger {name}",
            )
            self._undo.append(self.server.close)
            told = str(addresses.advertised(self.server.addresses[1], advertise)) if listen else ""
            self._info = MessengerInfo(
                name=name, socket=str(Path(self.server.path).resolve()), listen=told, host=host_id()
            )
            if master:
                self._join(master, security)
        except BaseException:
            self.close()
            raise

    def _until_close(self, segment: Segment) -> Segment:
        self._undo.append(segment.close)
        return segment

    def _join(self, master: str, security: Security) -> None:
        def connect() -> Channel:
            return SocketChannel(master, _MASTER_S, security=security)

        def link(other: MessengerInfo, tenant: str) -> MessengerLink:
            return reach(other, host_id(), lambda text: MessengerLink.open(text, security=security, tenant=tenant))

        self.service.tasks = Tasks(self.service, link)
        self._publisher = publisher = Publisher(self.service, self.info, connect)
        self.service.told = publisher
        self._undo.append(publisher.close)

    @property
    def joined(self) -> bool:
        """Whether its master knows it now; always, if it is alone."""
        return self._publisher is None or self._publisher.joined

    def wait_joined(self, timeout: float) -> bool:
        """Whether the master has heard of this messenger, at the latest after `timeout` seconds; always, if it is alone."""
        return self._publisher is None or self._publisher.wait_joined(timeout)

    def info(self) -> MessengerInfo:
        """Who this is, with its figures of now."""
        stats = self.service.stats()
        return msgspec.structs.replace(
            self._info,
            capacity=stats.capacity,
            used=stats.used,
            objects=stats.objects,
            draining=self.service.draining,
        )

    def close(self) -> None:
        """Idempotent."""
        while self._undo:
            self._undo.pop()()
