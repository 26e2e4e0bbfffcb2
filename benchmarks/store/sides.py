"""The processes of each side, and a handle on its client process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.store import peer_venv
from moonpool.testing.cluster import LocalCluster
from moonpool.testing.leaks import eventually

ROOT = Path(__file__).resolve().parents[2]
SEGMENT = 1 << 30
"""Bytes that each side lends to its pool."""
BUFFER = 128 << 20
"""Bytes of the client's source, and of its target: four times a large last-level cache."""


class Worker:
    """A client process; see `worker`."""

    def __init__(self, kind: str, python: str, arguments: dict[str, Any], prefix: Sequence[str] = ()) -> None:
        self.kind = kind
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [*prefix, python, "-m", "benchmarks.store.worker", kind, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
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
        self._log.seek(0)
        return self._log.read()[-2000:]

    def close(self) -> None:
        """Let it close its store and end; after 10 s, end it."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._log.close()


class Sides:
    """Starts sides, and ends all that it started, last first."""

    def __init__(self, peer_python: Path | None) -> None:
        self._python = peer_python
        self._binaries = peer_venv.binaries(peer_python) if peer_python else Path()
        self._stack = ExitStack()

    @property
    def has_peer(self) -> bool:
        return self._python is not None

    def ours(self, segment: int = SEGMENT, buffer: int = BUFFER) -> Worker:
        """Master, messenger and client, each a process."""
        cluster = self._stack.enter_context(LocalCluster(capacity=segment))
        return self._worker(
            "ours",
            {"master": cluster.master.socket, "messenger": cluster.messengers[0].socket, "buffer": buffer},
        )

    def ours_embedded(self, segment: int = SEGMENT, buffer: int = BUFFER) -> Worker:
        """All in one process."""
        return self._worker("ours-embedded", {"capacity": segment, "buffer": buffer})

    def peer(self, segment: int = SEGMENT, buffer: int = BUFFER) -> Worker:
        """The peer's master, a process that holds the segment, and a client without one: bytes go over TCP."""
        master = self.peer_master()
        self._worker("peer", {**master, "segment": segment, "local": 64 << 20, "buffer": 0})
        return self._worker("peer", {**master, "segment": 0, "local": 64 << 20, "buffer": buffer})

    def peer_embedded(self, segment: int = SEGMENT, buffer: int = BUFFER) -> Worker:
        """The peer's master, and one process that is client and holder: bytes are copied in it."""
        return self._worker("peer", {**self.peer_master(), "segment": segment, "local": 64 << 20, "buffer": buffer})

    def peer_shm(self, segment: int = SEGMENT, buffer: int = BUFFER) -> Worker:
        """The peer's master, its `mooncake_client` as the holder, and a client that shares memory with it."""
        master, port = self.peer_master(), free_port()
        self.start(
            [
                str(self._binaries / "mooncake_client"),
                "--host=127.0.0.1",
                f"--port={port}",
                f"--global_segment_size={segment >> 20}MB",
                f"--master_server_address={master['master']}",
                f"--metadata_server={master['metadata']}",
            ],
            port,
        )
        return self._worker("peer-shm", {"server": f"127.0.0.1:{port}", "buffer": buffer})

    def peer_master(self, host: str = "127.0.0.1") -> dict[str, str]:
        """A master with its metadata service: their addresses."""
        rpc, http, metrics = free_port(), free_port(), free_port()
        self.start(
            [
                str(self._binaries / "mooncake_master"),
                f"--rpc_address={host}",
                f"--rpc_port={rpc}",
                f"--metrics_host={host}",
                f"--metrics_port={metrics}",
                "--enable_http_metadata_server=true",
                f"--http_metadata_server_port={http}",
                "--logtostderr",
            ],
            rpc,
            http,
        )
        return {"master": f"{host}:{rpc}", "metadata": f"http://{host}:{http}/metadata"}

    def start(self, command: list[str], *ports: int) -> subprocess.Popen[bytes]:
        """A process that listens on `ports` of loopback."""
        log = self._stack.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._stack.callback(_end, process)
        if not eventually(lambda: process.poll() is not None or all(map(_listens, ports)), timeout_s=30):
            raise RuntimeError(f"{command[0]} does not listen on {ports}")
        if process.poll() is not None:
            log.seek(0)
            raise RuntimeError(f"{command[0]}: {log.read()[-2000:].decode(errors='replace')}")
        return process

    def _worker(self, kind: str, arguments: dict[str, Any]) -> Worker:
        python = str(self._python) if kind.startswith("peer") else sys.executable
        worker = Worker(kind, python, arguments)
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


def _listens(port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(0.5)
        return s.connect_ex(("127.0.0.1", port)) == 0


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


os.environ.setdefault("OMP_NUM_THREADS", "1")
