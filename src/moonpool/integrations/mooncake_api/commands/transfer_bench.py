"""`transfer_engine_bench`: how fast this machine's transfer engine reads or writes another's memory."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from moonpool.errors import ConfigError, MoonpoolError
from moonpool.integrations.mooncake_api import flags
from moonpool.integrations.mooncake_api.commands.running import run
from moonpool.integrations.mooncake_api.engine import TransferEngine

FLAGS = {
    "mode": flags.Flag("initiator"),
    "local_server_name": flags.Flag(socket.gethostname()),
    "metadata_server": flags.Flag("P2PHANDSHAKE"),
    "segment_id": flags.Flag("127.0.0.1"),
    "operation": flags.Flag("read"),
    "buffer_size": flags.size(1 << 30),
    "block_size": flags.size(1 << 16),
    "batch_size": flags.number(128),
    "threads": flags.number(12),
    "duration": flags.number(10),
}
_IDLE = """
protocol device_name nic_priority_matrix auto_discovery report_unit report_precision backend use_vram init_mem gpu_id
logtostderr alsologtostderr log_dir v minloglevel
"""
IDLE = frozenset(_IDLE.split())


def main(arguments: Sequence[str]) -> None:
    given = flags.parse(arguments, FLAGS, IDLE)
    for name, allowed in (("mode", ("initiator", "target")), ("operation", ("read", "write"))):
        if given[name] not in allowed:
            raise ConfigError("bad value", key=f"--{name}", need=" or ".join(allowed), have=given[name])
    engine = TransferEngine()
    if engine.initialize(given["local_server_name"], given["metadata_server"], "tcp", ""):
        raise MoonpoolError("the transfer engine did not start: see the log", key=given["local_server_name"])
    address = engine.allocate_managed_buffer(given["buffer_size"])
    if not address:
        raise ConfigError("no memory", key="--buffer_size", have=f"{given['buffer_size']} B")
    if given["mode"] == "target":
        name = given["local_server_name"].partition(":")[0]
        print(f"numa node num: 1\ntarget ready: --segment_id={name}:{engine.get_rpc_port()}", flush=True)
        threading.Event().wait()
    _initiate(engine, address, given)


def _initiate(engine: TransferEngine, address: int, given: dict[str, Any]) -> None:
    target = engine.get_first_buffer_address(given["segment_id"])
    if not target:
        raise MoonpoolError("no such target, or it has no memory", key=given["segment_id"])
    step, batch = given["block_size"], given["batch_size"]
    if given["threads"] * batch * step > given["buffer_size"]:
        raise ConfigError("too small for threads * batch_size * block_size", key="--buffer_size")
    call = engine.batch_transfer_sync_read if given["operation"] == "read" else engine.batch_transfer_sync_write
    start, deadline = time.monotonic(), time.monotonic() + given["duration"]
    done: list[int] = []

    def work(number: int) -> None:
        offsets = [(number * batch + i) * step for i in range(batch)]
        while time.monotonic() < deadline:
            mine, theirs = [address + o for o in offsets], [target + o for o in offsets]
            if call(given["segment_id"], mine, theirs, [step] * batch):
                raise MoonpoolError("a transfer failed", key=given["segment_id"])
            done.append(batch * step)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(given["threads"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    print(
        f"Test completed: duration {seconds:.2f}, batch count {len(done)}, throughput {sum(done) / seconds / 1e9:.2f} GB/s"
    )


if __name__ == "__main__":
    sys.exit(run("transfer_engine_bench", main))
