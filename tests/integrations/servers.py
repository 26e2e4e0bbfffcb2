"""The drop-in's commands as real processes, at ports of their own."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from moonpool.integrations.mooncake_api import launch
from moonpool.integrations.mooncake_api.store import MooncakeDistributedStore
from moonpool.testing.leaks import eventually

MIB = 1 << 20


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Command:
    """One command; `start` returns when it listens at `port`."""

    def __init__(self, folder: Path, port: int, *words: str) -> None:
        self.port, self._words, self._log = port, words, folder / f"{words[0]}-{port}.log"
        self._environment = launch.environment({**os.environ, "XDG_RUNTIME_DIR": str(folder)})
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(self._words, env=self._environment, stdout=out, stderr=out)
        assert eventually(lambda: self._listens() or self._ended(), timeout_s=30), self.log
        assert not self._ended(), self.log

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    @property
    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        assert self.process is not None
        self.process.terminate()
        process, self.process = self.process, None
        return process.wait(20)


class Peers:
    """A master, what else is started, and the stores of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._commands: list[Command] = []
        self._stores: list[MooncakeDistributedStore] = []
        self.metrics = free_port()
        port = free_port()
        self.master = self.command(port, "mooncake_master", f"--port={port}", f"--metrics_port={self.metrics}")
        self.address = f"127.0.0.1:{port}"

    def command(self, port: int, *words: str) -> Command:
        command = Command(self.folder, port, *words)
        self._commands.append(command)
        command.start()
        return command

    def client(self, *more: str) -> Command:
        port = free_port()
        words = [f"--port={port}", f"--master_server_address={self.address}", "--global_segment_size=64MB", *more]
        return self.command(port, "mooncake_client", *words)

    def setup(self, segment: int = 64 * MIB, hostname: str = "localhost", **more: object) -> MooncakeDistributedStore:
        store = MooncakeDistributedStore()
        self._stores.append(store)
        arguments: Sequence[object] = (hostname, "P2PHANDSHAKE", segment, 16 * MIB, "tcp", "", self.address)
        assert store.setup(*arguments, **more) == 0
        return store

    def close(self) -> None:
        for store in self._stores:
            store.close()
        for command in reversed(self._commands):
            command.kill()
