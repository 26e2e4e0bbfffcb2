"""Two real TransferEngine processes find each other through our metadata server and exchange data over TCP.

MOONPOOL_PEER_PYTHON names a Python that has `mooncake-transfer-engine-non-cuda`; without it the test is skipped.
"""

from __future__ import annotations

import os
import socket
import subprocess

import pytest

from moonpool.store.metadata.server import MetadataServer
from moonpool.testing.leaks import eventually, no_leaks

PYTHON = os.environ.get("MOONPOOL_PEER_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="MOONPOOL_PEER_PYTHON names no Python that has the peer's engine")

TARGET = """
import sys
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize(sys.argv[1], sys.argv[2], "tcp", "") == 0
assert engine.allocate_managed_buffer(1 << 20)
address = engine.get_first_buffer_address(sys.argv[1])  # of the slab that the buffer is cut from
engine.write_bytes_to_buffer(address, "from the target".ljust(64), 64)
print("ready", flush=True)
sys.stdin.readline()
print(engine.read_bytes_from_buffer(address + 4096, 18).decode(), flush=True)
"""

INITIATOR = """
import sys
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize(sys.argv[1], sys.argv[2], "tcp", "") == 0
local = engine.allocate_managed_buffer(1 << 20)
remote = engine.get_first_buffer_address(sys.argv[3])
assert remote, "no descriptor of the target"
assert engine.transfer_sync_read(sys.argv[3], local, remote, 64) == 0
print(engine.read_bytes_from_buffer(local, 15).decode())
engine.write_bytes_to_buffer(local, "from the initiator", 18)
assert engine.transfer_sync_write(sys.argv[3], local, remote + 4096, 18) == 0
assert engine.send_probe(sys.argv[3]) == 0
assert engine.send_probe("127.0.0.1:9") != 0
"""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _start(program: str, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"MC_FORCE_TCP": "1", "MC_TCP_BIND_ADDRESS": "127.0.0.1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([PYTHON, "-c", program, *words], text=True, env=environment, **pipes)  # type: ignore[call-overload]


def test_two_real_engines_exchange_data_through_our_metadata_server() -> None:
    target_name, initiator_name = f"127.0.0.1:{_free_port()}", f"127.0.0.1:{_free_port()}"
    with no_leaks(), MetadataServer() as server:
        with _start(TARGET, target_name, server.url) as target:
            assert target.stdout is not None
            assert target.stdout.readline() == "ready\n"
            assert f"mooncake/rpc_meta/{target_name}" in server.table.values
            assert b'"tcp"' in server.table.values[f"mooncake/ram/{target_name}"]
            with _start(INITIATOR, initiator_name, server.url, target_name) as initiator:
                output, _ = initiator.communicate(timeout=60)
            assert initiator.returncode == 0
            assert output == "from the target\n"
            written, _ = target.communicate("look\n", timeout=60)
            assert written == "from the initiator\n"
        assert eventually(lambda: not any(initiator_name in key for key in server.table.values))
        server.table.remove_owner(target_name)
        assert not server.table.values
