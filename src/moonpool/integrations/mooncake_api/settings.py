"""What `setup` was asked for, from its positional form and from its dict, in every spelling that its callers use."""

from __future__ import annotations

import difflib
import logging
import operator
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from moonpool.errors import ConfigError
from moonpool.integrations.mooncake_api.config import DEFAULT_CLIENT_HTTP_PORT, parse_bool, parse_size

log = logging.getLogger(__name__)

DEFAULT_MASTER = "127.0.0.1:50051"
_DICT_SIZE = 16 << 20
_MIN_SIZE = 1 << 10


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes are bytes; a segment of 0 makes a pure client, a local buffer of 0 a store that takes no values."""

    local_hostname: str
    metadata_server: str
    global_segment_size: int = _DICT_SIZE
    local_buffer_size: int = _DICT_SIZE
    protocol: str = "tcp"
    rdma_devices: str = ""
    master_server_addr: str = DEFAULT_MASTER
    ipc_socket_path: str = ""
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = DEFAULT_CLIENT_HTTP_PORT
    shares_engine: bool = False
    """The caller brought a transfer engine, so the port in `local_hostname` is that engine's and taken."""

    def check(self) -> Settings:
        """This. Raises ConfigError for what no store can be set up with."""
        for name in ("local_hostname", "metadata_server", "master_server_addr"):
            if not getattr(self, name).strip():
                raise ConfigError("is required", key=name, have=repr(getattr(self, name)))
        for name in ("global_segment_size", "local_buffer_size"):
            size = getattr(self, name)
            if size < 0 or 0 < size < _MIN_SIZE:
                raise ConfigError("not a size", key=name, need=f"0, or {_MIN_SIZE} B and more", have=f"{size} B")
        scheme, found, _ = self.master_server_addr.partition("://")
        if found and scheme not in ("tcp", "unix"):
            raise ConfigError(
                f"{scheme}:// is not supported",
                key="master_server_addr",
                have=self.master_server_addr,
                fix="Give the master's host:port; messengers outlive a lost master without a standby.",
            )
        if self.enable_ssd_offload and not self.ssd_offload_path:
            raise ConfigError("is required with enable_ssd_offload", key="ssd_offload_path")
        if self.protocol.lower() != "tcp" or self.rdma_devices:
            log.info(
                "protocol %r, devices %r: bytes go through shared memory on this host and TCP between hosts",
                self.protocol,
                self.rdma_devices,
            )
        return self


_ALIASES = {
    "master_server_address": "master_server_addr",
    "master_server": "master_server_addr",
    "device_name": "rdma_devices",
    "device_names": "rdma_devices",
}
_WITHOUT_MEANING = frozenset({"transfer_timeout", "storage_root_dir", "prefer_local_alloc"})
"""Keys that LMCache hands on although they are its own."""


def from_dict(config: Mapping[str, Any]) -> Settings:
    """Raises ConfigError; for an unknown key it names the nearest known one."""
    known = {f: f for f in Settings.__struct_fields__ if f != "shares_engine"} | _ALIASES
    given: dict[str, Any] = {}
    for key, value in config.items():
        if key in _WITHOUT_MEANING:
            log.info("%s = %r has no meaning here", key, value)
        elif key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            raise ConfigError(
                "unknown key",
                key=str(key),
                fix=f"Did you mean `{near[0]}`?" if near else f"Known are {', '.join(known)}.",
            )
        elif value is not None:
            _take(given, known[key], key, value)
    for name in ("local_hostname", "metadata_server"):
        if name not in given:
            raise ConfigError("is required", key=name)
    return Settings(**given).check()


def _take(given: dict[str, Any], name: str, key: str, value: object) -> None:
    parse = _PARSERS.get(name, str)
    try:
        parsed = parse(value)
    except (ValueError, TypeError) as e:
        raise ConfigError(f"bad value: {e}", key=key, have=repr(value)) from e
    if given.get(name, "") == "":  # LMCache fills `device_name` with "" beside a `rdma_devices` of the user's
        given[name] = parsed
    elif parsed not in ("", given[name]):
        raise ConfigError(f"given twice, with different values ({name})", key=key, have=f"{given[name]!r}, {parsed!r}")


_PARSERS: dict[str, Callable[[Any], object]] = {
    "global_segment_size": parse_size,
    "local_buffer_size": parse_size,
    "enable_ssd_offload": parse_bool,
    "enable_client_http_server": parse_bool,
    "client_http_port": int,
}


def setup(
    local_hostname: str,
    metadata_server: str,
    global_segment_size: int,
    local_buffer_size: int,
    protocol: str,
    rdma_devices: str,
    master_server_addr: str,
    engine: object = None,
    enable_ssd_offload: bool = False,
    ssd_offload_path: str = "",
    tenant_id: str = "default",
    enable_client_http_server: bool = False,
    client_http_port: int = DEFAULT_CLIENT_HTTP_PORT,
) -> Settings:
    """The settings of a positional `setup(...)`: it has that name because Python puts it into the TypeError for a keyword that is
    none, which callers read to retry without. Raises ConfigError, TypeError."""
    return Settings(
        local_hostname=_str(local_hostname, "local_hostname"),
        metadata_server=_str(metadata_server, "metadata_server"),
        global_segment_size=operator.index(global_segment_size),
        local_buffer_size=operator.index(local_buffer_size),
        protocol=_str(protocol, "protocol"),
        rdma_devices=_str(rdma_devices or "", "rdma_devices"),
        master_server_addr=_str(master_server_addr, "master_server_addr"),
        enable_ssd_offload=bool(enable_ssd_offload),
        ssd_offload_path=_str(ssd_offload_path, "ssd_offload_path"),
        tenant_id=_str(tenant_id, "tenant_id"),
        enable_client_http_server=bool(enable_client_http_server),
        client_http_port=operator.index(client_http_port),
        shares_engine=engine is not None,
    ).check()


def _str(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"setup(): {name} must be a str, not {type(value).__name__}")
    return value
