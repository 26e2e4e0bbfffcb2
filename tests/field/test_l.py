"""L: limits of the system. Each in a process of its own, whose limit it is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moonpool.testing.cluster import LocalCluster
from moonpool.testing.leaks import no_leaks

pytestmark = pytest.mark.cluster

_NO_LOCKED_MEMORY = """
import resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
from moonpool.store.embedded import EmbeddedPool
with EmbeddedPool(8 << 20) as pool:
    pool.put("k", bytes(4 << 20))
    assert pool.get("k") == bytes(4 << 20)
print("ok")
"""

_OUT_OF_DESCRIPTORS = """
import os, resource, sys
from moonpool.errors import MoonpoolError
from moonpool.store.client import PoolClient
from moonpool.types import Put
pool = PoolClient.connect(sys.argv[1], messenger=sys.argv[2])
assert pool.put("before", b"1") is Put.STORED
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
pool._home.get().close()  # as if the messenger had hung up: a new connection is needed
taken = []
while True:
    try:
        taken.append(os.dup(0))
    except OSError:
        break
for spare in range(4):
    [outcome] = pool.batch_put([f"k{spare}"], [b"2"])
    assert isinstance(outcome, MoonpoolError | Put), outcome
    assert pool.batch_get(["before"])[0] in (None, b"1")
    assert pool.batch_is_exist(["before"])[0] in (True, False)
    os.close(taken.pop())
for fd in taken:
    os.close(fd)
import time
end = time.monotonic() + 10
while pool.batch_get(["before"]) != [b"1"]:
    assert time.monotonic() < end, "it does not come back"
    time.sleep(0.01)
pool.close()
assert len(os.listdir("/proc/self/fd")) <= 5, os.listdir("/proc/self/fd")
print("ok")
"""


def run(program: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-3000:]


def test_no_memory_is_locked() -> None:
    """L1: the pool needs nothing of RLIMIT_MEMLOCK (an engine with RDMA does, and says so itself)"""
    run(_NO_LOCKED_MEMORY)


def test_a_client_out_of_descriptors_gets_misses_and_typed_errors_and_recovers() -> None:
    """L5, the client's side"""
    with no_leaks(), LocalCluster(messengers=1, capacity=4 << 20) as cluster:
        run(_OUT_OF_DESCRIPTORS, cluster.master.socket, cluster.messengers[0].socket)
