"""A master and messengers as real processes in a temporary folder: to kill, freeze, restart and leave without a trace.

with LocalCluster(messengers=2, capacity=64 << 20) as cluster:
    pool = cluster.client()
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from moonpool.errors import MoonpoolError, WireError
from moonpool.store.client import PoolClient
from moonpool.store.messenger.disk import DiskConfig
from moonpool.store.processes import MasterConfig, MessengerConfig
from moonpool.testing.leaks import eventually
from moonpool.types import MessengerInfo
from moonpool.wire import messages as m
from moonpool.wire.rpc import SocketChannel

_START_S = 20.0


class Node:
    """One process of the cluster."""

    def __init__(self, name: str, socket: str, command: list[str], log: Path) -> None:
        self.name, self.socket, self._command, self._log = name, socket, command, log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start, and wait until it answers on its socket. Raises MoonpoolError with the end of its log if it does not."""
        assert self._process is None, f"{self.name} is running"
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        if not eventually(lambda: self._exited() or _answers(self.socket), timeout_s=_START_S) or self._exited():
            self.kill()
            raise MoonpoolError("did not start", key=self.name, have=self._log.read_text()[-2000:])

    def _exited(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        return self.end(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP, and wait until it stands still: the signal alone is only a promise."""
        self._signal(signal.SIGSTOP)
        assert eventually(self._stopped, timeout_s=_START_S), f"{self.name} does not stop"

    def _stopped(self) -> bool:
        tasks = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in tasks)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def restart(self) -> None:
        """Kill and start again at the same socket, with an empty memory."""
        self.kill()
        self.start()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def end(self, number: signal.Signals) -> int:
        """Send the signal and wait for the end; returns the exit status, 0 if it was not running."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)  # a frozen process does not see SIGTERM
        try:
            return process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
            raise


class LocalCluster:
    """One master and `messengers` messengers of `capacity` bytes each."""

    def __init__(
        self,
        messengers: int = 1,
        capacity: int = 64 << 20,
        *,
        c2c_config: bytes = b"",
        expiry_s: float = 2.0,
        reservation_ttl_s: float = 60.0,
        listen: bool = False,
        disks: Collection[int] = (),
        disk_capacity: int = 64 << 20,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        """`listen`: over TCP too, on a loopback port; `disks`: numbers of the messengers that have a disk tier."""
        self.folder = self._folder = Path(tempfile.mkdtemp(prefix="moonpool-"))
        self._clients: list[PoolClient] = []
        c2c_file = self._folder / "c2c.json"
        c2c_file.write_bytes(c2c_config)
        config = MasterConfig(socket=str(self._folder / "master.sock"), expiry_s=expiry_s, quotas=dict(quotas or {}))
        self.master = self._node("master", config.socket, "master", config, str(c2c_file))
        self.messengers: list[Node] = []
        for i in range(messengers):
            socket = str(self._folder / f"m{i}.sock")
            messenger = MessengerConfig(
                name=f"m{i}",
                socket=socket,
                master=config.socket,
                capacity=capacity,
                reservation_ttl_s=reservation_ttl_s,
                listen="127.0.0.1:0" if listen else "",
                disk=DiskConfig(folder=str(self._folder / f"disk{i}"), capacity=disk_capacity) if i in disks else None,
            )
            self.messengers.append(self._node(f"m{i}", socket, "messenger", messenger))

    def _node(self, name: str, socket: str, module: str, config: msgspec.Struct, *more: str) -> Node:
        command = [sys.executable, "-m", f"moonpool.store.{module}", msgspec.json.encode(config).decode(), *more]
        return Node(name, socket, command, self._folder / f"{name}.log")

    def start(self) -> Self:
        try:
            for node in (self.master, *self.messengers):
                node.start()
            assert eventually(lambda: len(self.listed()) == len(self.messengers), timeout_s=_START_S)
        except BaseException:
            self.close()
            raise
        return self

    def listed(self) -> list[str]:
        """Names of the messengers that the master takes for alive."""
        return [i.name for i in self.infos()]

    def infos(self) -> list[MessengerInfo]:
        """The messengers that the master takes for alive, with their addresses of now."""
        channel = SocketChannel(self.master.socket, timeout=5)
        try:
            return channel.call(m.ListMessengers(), m.Messengers).messengers
        finally:
            channel.close()

    def located(self, key: str) -> list[str]:
        """Names of the messengers that hold `key`, as the master's index says."""
        channel = SocketChannel(self.master.socket, timeout=5)
        try:
            return channel.call(m.Locate([key]), m.Located).holders[0]
        finally:
            channel.close()

    def client(self, home: int = 0, *, far: bool = False, tenant: str = "") -> PoolClient:
        """A client whose home is the messenger with this number; closed with the cluster. `far`: over TCP."""
        address = self.messengers[home].socket
        if far:
            address = next(i.listen for i in self.infos() if i.name == self.messengers[home].name)
        client = PoolClient.connect(self.master.socket, messenger=address, tenant=tenant, shared_memory=not far)
        self._clients.append(client)
        return client

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def close(self) -> None:
        """Close the clients, end the processes, remove the folder. Idempotent."""
        while self._clients:
            self._clients.pop().close()
        for node in (*self.messengers, self.master):
            node.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _answers(socket: str) -> bool:
    try:
        channel = SocketChannel(socket, timeout=5)
    except WireError:
        return False
    channel.close()
    return True
