"""The real Mooncake Store for tests: its master as a process of ours, its client package from wherever it is installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from moonpool.store.mooncake import MooncakeConfig, MooncakePool
from moonpool.testing.leaks import eventually

_START_S = 20.0


def peer_master() -> str:
    """Path of `mooncake_master`; skips the test where there is none. Makes `import mooncake` work."""
    venv = os.environ.get("MOONPOOL_PEER_VENV", "")
    found = shutil.which("mooncake_master", path=f"{venv}/bin" if venv else None)
    if not found:
        pytest.skip(
            "no mooncake_master: `pip install mooncake-transfer-engine-non-cuda`, and name its venv in MOONPOOL_PEER_VENV"
        )
    packages = Path(found).parents[1] / f"lib/python3.{sys.version_info.minor}/site-packages"
    if packages.is_dir() and str(packages) not in sys.path:
        sys.path.append(str(packages))  # last: our own packages come first
    return found


class PeerMaster:
    """A master of the peer on free ports of the loopback, with its own log."""

    def __init__(self, *flags: str) -> None:
        self._command, self._flags = peer_master(), flags
        self.rpc, self.admin = f"127.0.0.1:{_free_port()}", f"127.0.0.1:{_free_port()}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [
            self._command,
            "--rpc_address=127.0.0.1",
            f"--rpc_port={_port(self.rpc)}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={_port(self.admin)}",
            "--logtostderr",
            *self._flags,
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        if not eventually(lambda: _listens(self.rpc) and _listens(self.admin), timeout_s=_START_S):
            self.kill()
            raise RuntimeError("mooncake_master did not start")
        return self

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
        self._log.close()

    def config(self, capacity: int, *, slab: int | None = None, watch_s: float = 0.0) -> MooncakeConfig:
        """A client that lends `capacity` bytes."""
        return MooncakeConfig(
            master_server_address=self.rpc,
            admin_address=self.admin,
            local_hostname="127.0.0.1",
            global_segment_size=capacity,
            slab_size=capacity if slab is None else slab,
            watch_s=watch_s,
        )

    def client(
        self, capacity: int, *, slab: int | None = None, watch_s: float = 0.0, c2c_config: bytes = b""
    ) -> MooncakePool:
        return MooncakePool.connect(self.config(capacity, slab=slab, watch_s=watch_s), c2c_config=c2c_config)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _listens(address: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(_port(address))), 0.3).close()
    except OSError:
        return False
    return True
