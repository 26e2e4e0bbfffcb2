"""`mooncake_client`: a messenger, which stores in other processes of this host join by its port (`setup_dummy`)."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

import msgspec

from moonpool.errors import ConfigError
from moonpool.integrations.mooncake_api import dummy, flags, http_pages, settings
from moonpool.integrations.mooncake_api.commands.running import run
from moonpool.integrations.mooncake_api.http_front import HttpThread
from moonpool.integrations.mooncake_api.joining import bind_host, disk_at, messengers_of
from moonpool.store.processes import MessengerConfig, run_messenger
from moonpool.wire import address as addresses
from moonpool.wire.auth import security_from_environment

FLAGS = {
    "host": flags.Flag("127.0.0.1"),
    "port": flags.number(50052),
    "global_segment_size": flags.size(4 << 30),
    "master_server_address": flags.Flag(settings.DEFAULT_MASTER),
    "tenant_id": flags.Flag("default"),
    "enable_offload": flags.switch(),
    "enable_http_server": flags.switch(),
    "http_port": flags.number(9300),
}
_IDLE = """
metadata_server device_names protocol threads local_buffer_size start_offload_rpc_server logtostderr alsologtostderr
log_dir v minloglevel
"""
IDLE = frozenset(_IDLE.split())


def main(arguments: Sequence[str]) -> None:
    given = flags.parse(arguments, FLAGS, IDLE)
    port, host = given["port"], given["host"]
    security = security_from_environment()
    master = str(addresses.parse(given["master_server_address"]))
    messengers_of(master, security)
    if addresses.is_wildcard(addresses.TcpAddress(host, port)):
        host = "localhost"
    config = MessengerConfig(
        name=str(addresses.TcpAddress(host, port)),
        socket=str(dummy.socket_path(port)),
        master=master,
        listen=str(addresses.TcpAddress(bind_host(host, security), port)),
        capacity=given["global_segment_size"],
        disk=disk_at(_offload_folder()) if given["enable_offload"] else None,
    )
    tenant = "" if given["tenant_id"] == "default" else given["tenant_id"]
    door = dummy.Door(master=master, socket=config.socket, tenant=tenant)
    with contextlib.ExitStack() as stack:
        if given["enable_http_server"]:
            app = http_pages.client_app(lambda: 0, lambda: messengers_of(master, security))
            stack.callback(HttpThread(app, "127.0.0.1", given["http_port"], "client metrics").close)
        path = dummy.door_path(port)
        path.write_bytes(msgspec.json.encode(door))
        stack.callback(path.unlink, missing_ok=True)
        run_messenger(config)


def _offload_folder() -> str:
    folder = os.environ.get("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", "")
    if not folder:
        raise ConfigError("is required with --enable_offload", key="MOONCAKE_OFFLOAD_FILE_STORAGE_PATH")
    return folder


if __name__ == "__main__":
    sys.exit(run("mooncake_client", main))
