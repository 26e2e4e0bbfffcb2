"""Master and messenger inside one process: the same services and the same client, without sockets."""

from __future__ import annotations

from moonpool.clock import Clock
from moonpool.store.client import PoolClient
from moonpool.store.master.service import MasterService
from moonpool.store.messenger.service import MessengerService
from moonpool.store.messenger.state import Limits
from moonpool.transfer.segment import Segment
from moonpool.wire.rpc import LocalChannel


class EmbeddedPool(PoolClient):
    """A pool of `capacity` bytes that ends with `close`."""

    def __init__(
        self, capacity: int, *, c2c_config: bytes = b"", clock: Clock | None = None, limits: Limits | None = None
    ) -> None:
        self._segment = Segment.create(capacity)
        self.service = MessengerService(self._segment, clock=clock, limits=limits or Limits(changes_kept=0))
        self.master = MasterService(c2c_config, clock=clock)
        super().__init__(lambda: LocalChannel(self.service), lambda: LocalChannel(self.master), clock=clock)

    def close(self) -> None:
        self.service.close()
        super().close()
        self._segment.close()
