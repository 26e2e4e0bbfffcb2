"""Master and messenger inside one process: the same services and the same client, without sockets."""

from __future__ import annotations

from moonpool.clock import Clock
from moonpool.store.client import PoolClient
from moonpool.store.links import MessengerLink
from moonpool.store.master.service import MasterService
from moonpool.store.messenger.disk import DiskConfig, DiskTier
from moonpool.store.messenger.records import Limits
from moonpool.store.messenger.service import MessengerService
from moonpool.transfer.segment import Segment
from moonpool.wire.rpc import LocalChannel


class EmbeddedPool(PoolClient):
    """A pool of `capacity` bytes that ends with `close`."""

    def __init__(
        self,
        capacity: int,
        *,
        c2c_config: bytes = b"",
        clock: Clock | None = None,
        limits: Limits | None = None,
        disk: DiskConfig | None = None,
        tenant: str = "",
    ) -> None:
        """Raises ConfigError (the memory cannot be had), DiskError."""
        tier = DiskTier.open(disk) if disk else None
        self._segment = Segment.create(capacity)
        limits = limits or Limits(changes_kept=0)
        self.service = MessengerService(self._segment, name="embedded", clock=clock, limits=limits, disk=tier)
        self.master = MasterService(c2c_config, clock=clock)
        super().__init__(
            lambda: MessengerLink.mapped(LocalChannel(self.service), tenant),
            lambda: LocalChannel(self.master),
            tenant=tenant,
            clock=clock,
        )

    def close(self) -> None:
        self.service.close()
        super().close()
        self._segment.close()
