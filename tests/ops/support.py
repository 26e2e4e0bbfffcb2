"""A pool in this process, and `moonpool` commands as real ones."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from moonpool.store.client import PoolClient
from moonpool.store.host import MessengerHost
from moonpool.store.master.service import MasterService
from moonpool.testing.leaks import eventually
from moonpool.wire.auth import Security
from moonpool.wire.rpc import Server

MIB = 1 << 20


class SmallPool:
    """A master and messengers `m0`, `m1`, … in this process, over sockets in `folder`."""

    def __init__(
        self, stack: ExitStack, folder: Path, *, messengers: int = 2, capacity: int = 8 * MIB, security: Security
    ) -> None:
        self.folder, self._stack, self._security = folder, stack, security
        self.master = str(folder / "master")
        self.service = MasterService()
        self.server = Server(self.master, self.service, security=security, name="master")
        stack.callback(self.server.close)
        self.hosts = [self.add(f"m{i}", capacity) for i in range(messengers)]
        assert eventually(lambda: len(self.service.messengers()) == messengers)

    def add(self, name: str, capacity: int = 8 * MIB) -> MessengerHost:
        host = MessengerHost(
            name=name, socket=str(self.folder / name), capacity=capacity, master=self.master, security=self._security
        )
        self._stack.callback(host.close)
        return host

    def client(self, home: str = "m0", tenant: str = "") -> PoolClient:
        at = str(self.folder / home)
        client = PoolClient.connect(self.master, messenger=at, tenant=tenant, security=self._security)
        return self._stack.enter_context(closing(client))


@contextmanager
def small_pool(
    folder: Path, messengers: int = 2, capacity: int = 8 * MIB, security: Security = Security()
) -> Iterator[SmallPool]:
    with ExitStack() as stack:
        yield SmallPool(stack, folder, messengers=messengers, capacity=capacity, security=security)


class Command:
    """One `moonpool …` process; ended with the `with` block."""

    def __init__(self, folder: Path, arguments: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self.log = folder / f"{len(list(folder.glob('*.log')))}.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moonpool", *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def says(self, text: str) -> bool:
        """Waits until it has said so; false if it ended before."""
        eventually(lambda: text in self.text() or self.process.poll() is not None, timeout_s=30)
        return text in self.text()

    def text(self) -> str:
        return self.log.read_text()

    def end(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 20.0) -> int:
        """Send the signal; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)
