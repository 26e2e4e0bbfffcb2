"""The way to a `mooncake_client` on this host: a file that its port names says where its messenger and its master are."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from moonpool.errors import ConfigError, ConnectionLost
from moonpool.integrations.mooncake_api import names
from moonpool.integrations.mooncake_api.joining import Joined, messengers_of
from moonpool.store.client import PoolClient
from moonpool.wire.auth import security_from_environment


class Door(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a `mooncake_client` writes about itself."""

    master: str
    socket: str
    tenant: str = ""


def folder() -> Path:
    """For this user only: $XDG_RUNTIME_DIR/moonpool, or moonpool-UID in the temporary folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(runtime) / "moonpool" if runtime else Path(tempfile.gettempdir()) / f"moonpool-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid() or path.stat().st_mode & 0o077:
        raise ConfigError("the folder is open to others", key=str(path), fix=f"Run: chmod 700 {path}")
    return path


def socket_path(port: int) -> Path:
    return folder() / f"mooncake_client_{port}.sock"


def door_path(port: int) -> Path:
    return folder() / f"mooncake_client_{port}.json"


def join(server_address: str, local_buffer_size: int) -> Joined:
    """Raises ConfigError for an address that is none, ConnectionLost if no `mooncake_client` runs at its port on this host."""
    host, port = names.split(server_address)
    if port is None:
        raise ConfigError(
            "no port", key="server_address", have=server_address, fix="Give host:port of a mooncake_client."
        )
    try:
        door = msgspec.json.decode(door_path(port).read_bytes(), type=Door)
    except (OSError, msgspec.DecodeError) as e:
        raise ConnectionLost(f"no mooncake_client on this host: {e}", key=server_address) from e
    security = security_from_environment()
    messengers_of(door.master, security)
    pool = PoolClient.connect(door.master, messenger=door.socket, tenant=door.tenant, security=security)
    return Joined(names.join(host, port), local_buffer_size, lambda: pool, owned=True)
