"""Transfers by the real Mooncake TransferEngine (RDMA, several NICs), from the package `mooncake-transfer-engine`.

The peer's memory is named by absolute address there, so ops have region 0 (`registry.BY_ADDRESS`) and generation 0. Local buffers
must be registered with the engine (`register`), as RDMA needs it. The engine reports a batch as a whole; when one fails, each op is
tried again by itself, so that the results are per op.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from moonpool.errors import ConfigError, ConnectionLost, DeadlineExceeded, MoonpoolError, PoolClosed, TransferError
from moonpool.transfer.base import Op, Result, check
from moonpool.transfer.registry import BY_ADDRESS, Region, Registry, address_of

_DONE, _FAILED = 1, -1
_POLL_S = 0.0002


class MooncakeEngine:
    """One engine of this process: its memory, and transports to its peers (`to`)."""

    def __init__(
        self, hostname: str, *, metadata_server: str = "P2PHANDSHAKE", protocol: str = "rdma", device: str = ""
    ) -> None:
        """`hostname` is what peers reach this machine by. Raises ConfigError: no package, or the engine does not start."""
        self._engine = _make_engine()
        if self._engine.initialize(hostname, metadata_server, protocol, device):
            raise ConfigError(
                "Mooncake's engine does not start",
                key=hostname,
                have=f"{protocol} by {metadata_server}",
                fix="See its log above.",
            )
        host = hostname.rpartition(":")[0] if hostname.count(":") == 1 else hostname
        self.name = f"{host}:{self._engine.get_rpc_port()}" if metadata_server == "P2PHANDSHAKE" else hostname
        """What peers give to `to`."""
        self.registry = Registry()

    def register(self, buffer: Any, *, name: str = "") -> Region:
        """Raises TransferError, Overlap; TransferError too if the engine refuses (locked-memory limit?)."""
        region = self.registry.register(buffer, name=name)
        if code := self._engine.register_memory(region.address, region.size):
            self.registry.unregister(region)
            raise TransferError(
                "Mooncake's engine refuses the memory", key=name, have=f"code {code}", fix="Look at `ulimit -l`."
            )
        return region

    def unregister(self, region: Region) -> None:
        """Raises NotRegistered."""
        self.registry.unregister(region)
        self._engine.unregister_memory(region.address)

    def to(self, peer: str) -> MooncakeTransfer:
        return MooncakeTransfer(self._engine, self.registry, peer)

    def close(self) -> None:
        """Gives all memory back. (The engine itself ends with this object.)"""
        for region in self.registry.regions():
            self.unregister(region)


class MooncakeTransfer:
    """A `Transport` to one peer. Each op is a batch of its own to the engine, since that reports batches only as a whole.

    The engine cannot be told to stop. After DeadlineExceeded it may still read or write the op's `local` until it gives up itself;
    so this object keeps those buffers alive, and `late` says how many there are: nobody should use them again before it is 0.
    """

    def __init__(self, engine: Any, registry: Registry, peer: str) -> None:
        self._engine, self._registry, self._peer = engine, registry, peer
        self._lock = threading.Lock()
        self._late: dict[int, memoryview] = {}
        self._closed = False

    @property
    def late(self) -> int:
        """Ops past their deadline that the engine still works on."""
        with self._lock:
            for batch in [b for b in self._late if self._engine.transfer_check_status(b) != 0]:
                del self._late[batch]
            return len(self._late)

    def run(self, ops: Sequence[Op], *, timeout: float, checksum: bool = False) -> list[Result]:
        """See `Transport.run`. `checksum` is refused (TransferError): the engine has none."""
        if checksum:
            raise TransferError("Mooncake's engine has no checksums", fix="Use checksum=False, or the TCP transport.")
        if self._closed:
            raise PoolClosed("the transport is closed")
        check(ops)
        deadline = time.monotonic() + timeout
        started = [self._start(op) for op in ops]
        return [
            s if isinstance(s, MoonpoolError) else self._finish(op, s, deadline)
            for op, s in zip(ops, started, strict=True)
        ]

    def close(self) -> None:
        self._closed = True

    def _start(self, op: Op) -> int | MoonpoolError:
        """The engine's batch id; 0 for an op without bytes."""
        size, address = op.local.nbytes, address_of(op.local)
        if (op.region, op.generation) != (BY_ADDRESS, 0):
            return TransferError("the engine knows absolute addresses only", key=f"region {op.region}", need="region 0")
        if size == 0:
            return 0
        try:
            self._registry.find(address, size)
        except MoonpoolError as e:
            return e
        submit = (
            self._engine.batch_transfer_async_read if op.kind == "read" else self._engine.batch_transfer_async_write
        )
        batch: int = submit(self._peer, [address], [op.offset], [size])
        return batch or ConnectionLost("the engine cannot reach the peer", key=self._peer)

    def _finish(self, op: Op, batch: int, deadline: float) -> Result:
        while batch:
            status = self._engine.transfer_check_status(batch)
            if status == _DONE:
                break
            if status == _FAILED:
                return TransferError(
                    "the engine failed", key=self._peer, have=f"offset {op.offset:#x}", fix="See its log."
                )
            if time.monotonic() >= deadline:
                with self._lock:
                    self._late[batch] = op.local
                return DeadlineExceeded("the engine took too long", key=self._peer)
            time.sleep(_POLL_S)
        return op.local.nbytes


def _make_engine() -> Any:
    try:
        return importlib.import_module("mooncake.engine").TransferEngine()
    except ImportError as e:
        raise ConfigError(
            f"Mooncake's engine is not usable: {e}",
            key="mooncake.engine",
            fix="pip install mooncake-transfer-engine (with CUDA) or mooncake-transfer-engine-non-cuda, and libibverbs1.",
        ) from e
