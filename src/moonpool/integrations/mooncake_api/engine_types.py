"""The small parts of `mooncake.engine`: constants, enum, notes, and what is not offered."""

from __future__ import annotations

import logging
import os
from enum import IntEnum
from typing import Any

from moonpool.integrations.mooncake_api import names
from moonpool.wire.address import TcpAddress, is_loopback
from moonpool.wire.auth import Security

log = logging.getLogger(__name__)

SUPPORT_CUDA = SUPPORT_EFA = SUPPORT_HIP = SUPPORT_MNNVL = SUPPORT_MUSA = SUPPORT_INTRA_NVLINK = False


class TransferOpcode(IntEnum):
    Read = 0
    Write = 1


Read, Write = TransferOpcode.Read, TransferOpcode.Write


class TransferNotify:
    def __init__(self, name: str = "", msg: str = "") -> None:
        self.name, self.msg = name, msg


def listen_address(name: str, security: Security) -> TcpAddress:
    """Where the engine called `name` listens. Raises ConfigError for a name that is none."""
    host, port = names.split(name)
    host = os.environ.get("MC_TCP_BIND_ADDRESS") or host
    if security.secret is None and not is_loopback(TcpAddress(host, 0)):
        log.warning("%s: without a secret this engine serves this machine only. Set MOONPOOL_SECRET_FILE.", host)
        host = "127.0.0.1"
    return TcpAddress(host, (port or 0) if os.environ.get("MC_LEGACY_RPC_PORT_BINDING") else 0)


class _Absent:
    """Parts of the peer's module that are not transfers; nobody of SGLang, vLLM and LMCache uses them."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} is no part of Moonpool's engine: it has no RPC and no device memory"
        )


class RpcInterface(_Absent): ...


class SharedSegment(_Absent): ...


CoroRPCInterface = create_rpc_client = create_rpc_server = RpcInterface
