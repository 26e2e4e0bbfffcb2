"""A messenger inside this process, and a client whose home it is."""

from __future__ import annotations

import secrets
import tempfile

from moonpool.store.client import PoolClient
from moonpool.store.host import MessengerHost
from moonpool.store.links import MessengerLink
from moonpool.store.messenger.disk import DiskConfig
from moonpool.store.messenger.records import Limits
from moonpool.wire.auth import Security
from moonpool.wire.rpc import LocalChannel, SocketChannel

_JOIN_S = 2.5
_MASTER_S = 2.0
_PEER_S = 5.0


class Node:
    """What an engine that lends memory to the pool is."""

    def __init__(
        self,
        master: str,
        *,
        capacity: int,
        name: str = "",
        listen: str = "",
        advertise: str = "",
        tenant: str = "",
        disk: DiskConfig | None = None,
        limits: Limits | None = None,
        security: Security = Security(),
    ) -> None:
        """Raises ConnectionLost or DeadlineExceeded if the master does not answer, and as `MessengerHost`."""
        self.name = name or f"node-{secrets.token_hex(4)}"
        SocketChannel(master, _JOIN_S, security=security).close()  # an unreachable master is an error now
        self._folder = tempfile.TemporaryDirectory(prefix="moonpool-", ignore_cleanup_errors=True)
        try:
            self.host = MessengerHost(
                name=self.name,
                socket=f"{self._folder.name}/messenger.sock",
                capacity=capacity,
                master=master,
                listen=listen,
                advertise=advertise,
                disk=disk,
                limits=limits,
                security=security,
            )
            self.host.wait_joined(_JOIN_S)  # so that whoever lists the pool from now on sees this node
            try:
                self.pool = PoolClient(
                    lambda: MessengerLink.mapped(LocalChannel(self.host.service), tenant),
                    lambda: SocketChannel(master, _MASTER_S, security=security),
                    lambda address: MessengerLink.open(address, security=security, tenant=tenant, timeout=_PEER_S),
                    tenant=tenant,
                )
            except BaseException:
                self.host.close()
                raise
        except BaseException:
            self._folder.cleanup()
            raise

    def close(self) -> None:
        """Leave the pool: what this node holds goes with it. Idempotent."""
        self.pool.close()
        self.host.close()
        self._folder.cleanup()
