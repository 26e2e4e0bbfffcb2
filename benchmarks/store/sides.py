"""The processes of each side, and a handle on its client process."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from benchmarks.store import peer_venv
from moonpool.store.processes import MasterConfig, MessengerConfig, SecurityConfig
from moonpool.testing.cluster import Node
from moonpool.testing.leaks import eventually

ROOT = Path(__file__).resolve().parents[2]
_LOCAL = 64 << 20
"""Bytes of the peer's own staging buffer."""


class Worker:
    """A client process; see `worker`."""

    def __init__(self, kind: str, python: list[str], arguments: dict[str, Any], environment: dict[str, str]) -> None:
        self.kind = kind
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*python, "-m", "benchmarks.store.worker", kind, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env={**os.environ, **environment},
            )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def do(self, what: str, **arguments: Any) -> Any:
        """Run one command there and return its answer. Raises RuntimeError with the worker's own words."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "ended: " + self._end_of_log()}
        if "error" in answer:
            raise RuntimeError(f"{self.kind}: {answer['error']}")
        return answer["ok"]

    def _end_of_log(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it: it has nothing to save."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._folder.cleanup()


@dataclass
class PeerMaster:
    address: str
    metadata: str
    process: subprocess.Popen[bytes]
    command: list[str]
    ports: tuple[int, int]


@dataclass
class Nodes:
    master: Node
    messengers: list[Node]


class Sides:
    """Starts sides, and ends all that it started, last first."""

    def __init__(self, peer_python: Path | None) -> None:
        self._python = peer_python
        self._binaries = peer_venv.binaries(peer_python) if peer_python else Path()
        self._stack = ExitStack()

    @property
    def has_peer(self) -> bool:
        return self._python is not None

    def ours(self, segment: int, buffer: int) -> Worker:
        """Master, messenger and client, each a process."""
        return self.ours_client(self.nodes(1, capacity=segment), 0, buffer)

    def ours_client(self, nodes: Nodes, home: int, buffer: int) -> Worker:
        """One more client, of the messenger with this number."""
        arguments = {"master": nodes.master.socket, "messenger": nodes.messengers[home].socket, "buffer": buffer}
        return self._worker("ours", arguments)

    def nodes(self, messengers: int, **config: Any) -> Nodes:
        """Our master and messengers with the product's own defaults, but for `config` of the messengers."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-")))
        master = MasterConfig(socket=str(folder / "master.sock"))
        nodes = Nodes(Node("master", master.socket, _command("master", master), folder / "master.log"), [])
        for name in (f"m{i}" for i in range(messengers)):
            socket = str(folder / f"{name}.sock")
            messenger = MessengerConfig(name=name, socket=socket, master=master.socket, **config)
            nodes.messengers.append(Node(name, socket, _command("messenger", messenger), folder / f"{name}.log"))
        for node in (nodes.master, *nodes.messengers):
            self._stack.callback(node.kill)
            node.start()
        return nodes

    def ours_remote(self, there: Sequence[str], address: str, segment: int, buffer: int) -> Worker:
        """Master and client in this namespace, the messenger behind `address` in another: `there` is the prefix for commands in it.
        They share the file system, so the messenger finds the master's Unix socket; the bytes go over TCP."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-")))
        secret = folder / "secret"
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(16))
        security = SecurityConfig(secret_file=str(secret))
        at, port, socket = free_port(), free_port(), str(folder / "master.sock")
        master = MasterConfig(socket=socket, listen=f"127.0.0.1:{at}", security=security)
        self.start(_command("master", master), at)
        messenger = MessengerConfig(
            name="there",
            socket=str(folder / "there.sock"),
            master=socket,
            listen=f"{address}:{port}",
            capacity=segment,
            security=security,
        )
        self.start([*there, *_command("messenger", messenger)], port, host=address)
        arguments = {"master": socket, "messenger": f"{address}:{port}", "secret_file": str(secret), "buffer": buffer}
        return self._worker("ours-remote", arguments)

    def ours_embedded(self, segment: int, buffer: int) -> Worker:
        """All in one process."""
        return self._worker("ours-embedded", {"capacity": segment, "buffer": buffer})

    def peer(self, segment: int, buffer: int) -> Worker:
        """The peer's master, a process that holds the segment, and a client without one: bytes go over TCP."""
        master = self.peer_master()
        self.peer_client(master, segment, 0)
        return self.peer_client(master, 0, buffer)

    def peer_client(
        self, master: PeerMaster, segment: int, buffer: int, prefix: Sequence[str] = (), host: str = "127.0.0.1"
    ) -> Worker:
        """A process with the peer's default client: a holder (`segment`), a client (`buffer`), or both."""
        arguments = {"master": master.address, "metadata": master.metadata, "local": _LOCAL, "host": host}
        return self._worker("peer", arguments | {"segment": segment, "buffer": buffer}, prefix, host)

    def peer_embedded(self, segment: int, buffer: int) -> Worker:
        """The peer's master, and one process that is client and holder: bytes are copied in it."""
        return self.peer_client(self.peer_master(), segment, buffer)

    def peer_shm(self, segment: int, buffer: int) -> Worker:
        """The peer's master, its `mooncake_client` as the holder, and a client that shares memory with it."""
        master, port = self.peer_master(), free_port()
        self.start(
            [
                str(self._binaries / "mooncake_client"),
                "--host=127.0.0.1",
                f"--port={port}",
                f"--global_segment_size={segment >> 20}MB",
                f"--master_server_address={master.address}",
                f"--metadata_server={master.metadata}",
            ],
            port,
        )
        return self._worker("peer-shm", {"server": f"127.0.0.1:{port}", "buffer": buffer})

    def peer_master(self, host: str = "127.0.0.1") -> PeerMaster:
        """A master with its metadata service."""
        rpc, http, metrics = free_port(), free_port(), free_port()
        command = [
            str(self._binaries / "mooncake_master"),
            f"--rpc_address={host}",
            f"--rpc_port={rpc}",
            f"--metrics_host={host}",
            f"--metrics_port={metrics}",
            "--enable_http_metadata_server=true",
            f"--http_metadata_server_port={http}",
            "--logtostderr",
        ]
        process = self.start(command, rpc, http, host=host)
        return PeerMaster(f"{host}:{rpc}", f"http://{host}:{http}/metadata", process, command, (rpc, http))

    def nobody(self) -> PeerMaster:
        """Addresses at which no master listens; the metadata service is there."""
        there, port = self.peer_master(), free_port()
        return PeerMaster(f"127.0.0.1:{port}", there.metadata, there.process, there.command, there.ports)

    def restart(self, master: PeerMaster) -> None:
        """Start the peer's master again, at the same ports."""
        master.process = self.start(master.command, *master.ports)

    def start(self, command: list[str], *ports: int, host: str = "127.0.0.1") -> subprocess.Popen[bytes]:
        """A process that listens on `ports` of `host`."""
        log = Path(self._stack.enter_context(tempfile.TemporaryDirectory())) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self._stack.callback(_end, process)

        def settled() -> bool:
            return process.poll() is not None or all(_listens(host, p) for p in ports)

        if not eventually(settled, timeout_s=30) or process.poll() is not None:
            raise RuntimeError(f"{command[0]} does not listen on {ports}: {log.read_text(errors='replace')[-2000:]}")
        return process

    def _worker(
        self, kind: str, arguments: dict[str, Any], prefix: Sequence[str] = (), host: str = "127.0.0.1"
    ) -> Worker:
        python = str(self._python) if kind.startswith("peer") else sys.executable
        worker = Worker(kind, [*prefix, python], arguments, {"MC_TCP_BIND_ADDRESS": host})
        self._stack.callback(worker.close)
        return worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _listens(host: str, port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(0.5)
        return s.connect_ex((host, port)) == 0


def _command(module: str, config: msgspec.Struct) -> list[str]:
    return [sys.executable, "-m", f"moonpool.store.{module}", msgspec.json.encode(config).decode()]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def rss(pid: int) -> int:
    """Bytes of memory that a process has resident, of its own (shared ones left out)."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024
