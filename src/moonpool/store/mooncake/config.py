"""How to join a Mooncake cluster. Names are the peer's own where it has one, so its JSON file serves as a start."""

from __future__ import annotations

import re

import msgspec

from moonpool.errors import ConfigError

_SIZE = re.compile(r"\s*(\d+)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)
_LEAST_SEGMENT = 16 << 20
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


class MooncakeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes are bytes, or text such as `4gb` (powers of 1024, as the peer reads them)."""

    master_server_address: str
    """`host:port`, or what the peer takes for a master that is elected: `etcd://a;b`, `redis://…`."""
    local_hostname: str
    """How other nodes reach this one."""
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    """`rdma` where there is RDMA."""
    device_name: str = ""
    """RDMA devices, with commas."""
    global_segment_size: int | str = 0
    """Memory of this process that is lent to the cluster. 0 = none: a client only; else at least 16 MiB. What is lent goes
    with the process."""
    local_buffer_size: int | str = 16 << 20
    """The peer's own staging buffer; the slab does not use it."""
    tenant_id: str = "default"
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""

    slab_size: int | str = 256 << 20
    """Registered memory of this process for what is being read or written: bounds both together."""
    admin_address: str = ""
    """`host:port` of the master's `metrics_port`; needed to list keys and messengers and for the cluster's figures."""
    watch_s: float = 0.0
    """Seconds between two looks for puts of other processes in the master's list of keys (`admin_address`). 0 = never."""
    timeout_s: float = 3.0
    """Longest wait for the master to accept at the start, and for an answer of `admin_address`."""

    def __post_init__(self) -> None:
        for name in ("global_segment_size", "local_buffer_size", "slab_size"):
            size_of(getattr(self, name), name)
        if self.watch_s and not self.admin_address:
            raise ConfigError("the list of keys is at the admin port", key="watch_s", need="admin_address")
        if 0 < size_of(self.global_segment_size, "global_segment_size") < _LEAST_SEGMENT:
            raise ConfigError(
                "the peer lends no less",
                key="global_segment_size",
                need=f"0 or >= {_LEAST_SEGMENT} B",
                have=str(self.global_segment_size),
            )


def size_of(value: int | str, name: str) -> int:
    """Bytes of `4096`, `"16 MB"`, `"4gb"`. Raises ConfigError that names the field."""
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    size = int(found[1]) << _UNITS[found[2].lower()] if found else value
    if not isinstance(size, int) or size < 0:
        raise ConfigError("not a size", key=name, need="bytes, or text such as 512mb", have=repr(value))
    return size


def host_and_port(address: str, name: str) -> tuple[str, int]:
    """Raises ConfigError that names the field."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError("not an address", key=name, need="host:port", have=repr(address))
    return host.strip("[]"), int(port)
