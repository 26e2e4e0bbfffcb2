"""Registered memory and the transports that move bytes."""

from moonpool.transfer.base import Op, Result, Transport
from moonpool.transfer.client import TransferClient
from moonpool.transfer.local import LocalTransfer
from moonpool.transfer.registry import Region, Registry
from moonpool.transfer.server import TransferServer

__all__ = ["LocalTransfer", "Op", "Region", "Registry", "Result", "TransferClient", "TransferServer", "Transport"]
