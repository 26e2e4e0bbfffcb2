"""The peer's configuration file and environment variables, as its own `MooncakeConfig` reads them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

DEFAULT_GLOBAL_SEGMENT_SIZE = 3355443200  # 3.125 GiB
DEFAULT_LOCAL_BUFFER_SIZE = 1 << 30
DEFAULT_CLIENT_HTTP_PORT = 9300

_UNITS = {"t": 1 << 40, "g": 1 << 30, "m": 1 << 20, "k": 1 << 10}
_REQUIRED = ("local_hostname", "metadata_server", "master_server_address")
_TRUE, _FALSE = ("true", "1", "yes", "on", "enable"), ("false", "0", "no", "off", "disable", "")
_NAMES = """
tcp rdma efa nvmeof nvlink musa nvlink_intra hip barex cxl ascend ub ubshmem maca sunrise_link rpc_only
"""
_PROTOCOLS = frozenset(_NAMES.split())
_ENVIRONMENT = {
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "master_server_address": "MOONCAKE_MASTER",
    "enable_ssd_offload": "MOONCAKE_OFFLOAD_ENABLED",
    "ssd_offload_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "enable_client_http_server": "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",
    "client_http_port": "MOONCAKE_CLIENT_HTTP_PORT",
}


def parse_size(value: object) -> int:
    """Bytes: a number, or text such as `4gb`, `16 MB`, `1.5g`, `1024`. Raises ValueError."""
    if not isinstance(value, str):
        return int(value)  # type: ignore[call-overload,no-any-return]  # raises TypeError for what is no number
    text = value.strip().lower()
    if not text:
        raise ValueError("Invalid segment size: empty string")
    number = text.removesuffix("b")
    unit = _UNITS.get(number[-1:], 1)
    number = (number[:-1] if unit > 1 else number).strip()
    if not number:
        raise ValueError(f"Invalid segment size: missing number before '{text}'")
    return int(float(number) * unit)


_parse_segment_size = parse_size


def parse_bool(value: object) -> bool:
    """A bool, a number, None (false), or a word such as `yes` or `off`. Raises ValueError for any other text."""
    if value is None or isinstance(value, bool | int | float):
        return bool(value)
    text = str(value).strip().lower()
    if text not in _TRUE + _FALSE:
        raise ValueError(f"Invalid boolean value: {value!r}")
    return text in _TRUE


_parse_bool = parse_bool


@dataclass
class MooncakeConfig:
    """What a store is set up with. Raises ValueError for an empty protocol or address and for negative sizes."""

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    device_name: str | None
    master_server_address: str
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = DEFAULT_CLIENT_HTTP_PORT

    def __post_init__(self) -> None:
        protocol: object = self.protocol
        if not isinstance(protocol, str) or not protocol.strip():
            raise ValueError(
                f"Invalid protocol: {protocol!r}. Protocol must be a non-empty string, e.g. 'tcp' or 'rdma'."
            )
        self.protocol = protocol.strip().lower()
        if self.protocol not in _PROTOCOLS:
            log.warning("Unrecognised protocol %r; known: %s.", self.protocol, ", ".join(sorted(_PROTOCOLS)))
        for name in ("global_segment_size", "local_buffer_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"Invalid {name}: {getattr(self, name)}. Size must be non-negative.")
        for name in _REQUIRED:
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"Config field {name!r} must be a non-empty string, got {value!r}.")

    @staticmethod
    def from_file(file_path: str) -> MooncakeConfig:
        """From a JSON file. Raises ValueError that names a required field that is missing."""
        config = json.loads(Path(file_path).read_text())
        for name in _REQUIRED:
            if name not in config:
                raise ValueError(f"Missing required config field: {name}")
        return _config(config)

    @staticmethod
    def load_from_env() -> MooncakeConfig:
        """From the file that MOONCAKE_CONFIG_PATH names, or else from MOONCAKE_MASTER and its companions."""
        path = os.environ.get("MOONCAKE_CONFIG_PATH")
        if path is not None:
            return MooncakeConfig.from_file(path)
        if not os.environ.get("MOONCAKE_MASTER"):
            raise ValueError("Neither the environment variable 'MOONCAKE_CONFIG_PATH' nor 'MOONCAKE_MASTER' is set.")
        given = {field: os.environ[name] for field, name in _ENVIRONMENT.items() if name in os.environ}
        return _config({"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE", **given})


def _config(given: Mapping[str, Any]) -> MooncakeConfig:
    return MooncakeConfig(
        local_hostname=given["local_hostname"],
        metadata_server=given["metadata_server"],
        global_segment_size=parse_size(given.get("global_segment_size", DEFAULT_GLOBAL_SEGMENT_SIZE)),
        local_buffer_size=parse_size(given.get("local_buffer_size", DEFAULT_LOCAL_BUFFER_SIZE)),
        protocol=given.get("protocol", "tcp"),
        device_name=given.get("device_name", ""),
        master_server_address=given["master_server_address"],
        enable_ssd_offload=parse_bool(given.get("enable_ssd_offload", False)),
        ssd_offload_path=_text(given.get("ssd_offload_path"), ""),
        tenant_id=_text(given.get("tenant_id"), "default"),
        enable_client_http_server=parse_bool(given.get("enable_client_http_server", False)),
        client_http_port=int(given.get("client_http_port", DEFAULT_CLIENT_HTTP_PORT)),
    )


def _text(value: object, default: str) -> str:
    return default if value is None else str(value)
