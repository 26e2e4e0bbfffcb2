"""Registered memory and the transports that move bytes."""

from moonpool.transfer.base import Op, Result, Transport
from moonpool.transfer.client import TransferClient
from moonpool.transfer.registry import Region, Registry
from moonpool.transfer.server import TransferServer

__all__ = ["Op", "Region", "Registry", "Result", "TransferClient", "TransferServer", "Transport"]
