"""J: ports and addresses. A whole pool over IPv6."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from moonpool.store.client import PoolClient
from moonpool.store.host import MessengerHost
from moonpool.store.master.service import MasterService
from moonpool.testing.leaks import no_leaks
from moonpool.wire.rpc import Server


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback")
def test_a_pool_works_over_ipv6(tmp_path: Path) -> None:
    """J4"""
    with no_leaks():
        master = Server("[::1]:0", MasterService())
        address = str(master.addresses[0])
        assert address.startswith("[::1]:")
        host = MessengerHost(name="m0", socket=str(tmp_path / "m0"), capacity=1 << 20, master=address, listen="[::1]:0")
        assert host.wait_joined(10)
        with PoolClient.connect(address, shared_memory=False) as pool:
            pool.put("k", b"v" * 100_000)
            assert pool.get("k") == b"v" * 100_000
            assert pool.replicas(["k"])[0][0].address.startswith("[::1]:")
        host.close()
        master.close()
