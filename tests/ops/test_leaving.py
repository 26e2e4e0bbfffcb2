"""How a messenger and its clients end: SIGTERM, SIGINT, and twice."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.errors import MoonpoolError, NoSpace
from moonpool.store.base import Reservation
from moonpool.store.client import PoolClient
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.types import Put
from tests.ops.support import MIB, Command

pytestmark = pytest.mark.cluster
READERS = 16


class Pool:
    """A master and two messengers as commands; `m0` also listens on TCP."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.master = folder, str(folder / "master")
        self.processes = [Command(folder, ["master", "--socket", self.master])]
        assert self.processes[0].says("master at"), self.processes[0].text()
        self.m0 = self.add("m0", "--listen", "127.0.0.1:0", "--grace", "5")
        self.m1 = self.add("m1")
        assert eventually(lambda: len(self.listed()) == 2)

    def add(self, name: str, *more: str) -> Command:
        at = str(self.folder / name)
        command = Command(
            self.folder,
            ["messenger", "--name", name, "--socket", at, "--master", self.master, "--capacity", "64MiB", *more],
        )
        self.processes.append(command)
        assert command.says(f"messenger {name} at"), command.text()
        return command

    def client(self, home: str) -> PoolClient:
        return PoolClient.connect(self.master, messenger=str(self.folder / home))

    def tcp_client(self) -> PoolClient:
        """Home is m0, over TCP: nothing is mapped."""
        with self.client("m1") as pool:
            [listen] = [i.listen for i in pool.messengers() if i.name == "m0"]
        return PoolClient.connect(self.master, messenger=listen, shared_memory=False)

    def listed(self) -> list[str]:
        with self.client("m1") as pool:
            return [i.name for i in pool.messengers()]

    def close(self) -> None:
        for process in self.processes:
            process.__exit__()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with no_leaks():
        pool = Pool(tmp_path)
        try:
            yield pool
        finally:
            pool.close()


def pattern(key: str, size: int) -> bytes:
    return (key.encode() + b"|") * (size // (len(key) + 1) + 1)


def test_sigterm_refuses_new_writes_lets_open_ones_end_and_then_leaves(pool: Pool) -> None:
    with pool.client("m0") as client, pool.client("m1") as other:
        client.put("read", b"r" * 1000)
        [writing] = client.reserve([("written", 1000)])
        assert isinstance(writing, Reservation)
        lease = client.open_read(["read"])
        pool.m0.process.send_signal(signal.SIGTERM)
        assert pool.m0.says("is leaving")
        alone = PoolClient.connect(messenger=str(pool.folder / "m0"))
        [refused] = alone.batch_put(["new"], [b"x"])
        assert isinstance(refused, NoSpace)
        alone.close()
        writing.view[:] = b"w" * 1000
        assert client.commit([writing]) == [Put.STORED]
        assert pool.m0.process.poll() is None, "a read is still open"
        assert bytes(lease.views[0] or b"") == b"r" * 1000
        start = time.monotonic()
        lease.close()
        assert pool.m0.process.wait(10) == 0
        assert time.monotonic() - start < 3, "it waits no longer than for what is open"
        assert [i.name for i in other.messengers()] == ["m1"], "it has left by the time it ends"
        assert not other.is_exist("read")


def test_sigterm_waits_for_a_stuck_reader_no_longer_than_the_grace(pool: Pool) -> None:
    short = pool.add("short", "--grace", "0.5")
    with pool.client("short") as client:
        client.put("read", b"r" * 1000)
        lease = client.open_read(["read"])
        start = time.monotonic()
        assert short.end() == 0
        assert 0.5 <= time.monotonic() - start < 4
        assert "did not end within 0.5 s" in short.text()
        assert bytes(lease.views[0] or b"") == b"r" * 1000, "what is mapped stays"
        lease.close()


def test_a_second_signal_ends_it_at_once(pool: Pool) -> None:
    with pool.client("m0") as client:
        client.put("read", b"r" * 1000)
        lease = client.open_read(["read"])
        pool.m0.process.send_signal(signal.SIGTERM)
        assert pool.m0.says("is leaving")
        start = time.monotonic()
        assert pool.m0.end(signal.SIGTERM) == -signal.SIGTERM
        assert time.monotonic() - start < 2
        lease.close()
    again = pool.add("m0")  # its socket is not in the way
    assert again.process.poll() is None


def test_e6_sigint_ends_a_messenger_with_a_stuck_reader_at_once(pool: Pool) -> None:
    with pool.client("m0") as client:
        client.put("read", b"r" * 1000)
        lease = client.open_read(["read"])
        start = time.monotonic()
        assert pool.m0.end(signal.SIGINT) == 0
        assert time.monotonic() - start < 4, "no grace for Ctrl-C"
        lease.close()


def test_sigterm_writes_the_memory_to_disk_and_the_next_start_has_it(pool: Pool, tmp_path: Path) -> None:
    disk = ["--disk", str(tmp_path / "disk"), "--disk-capacity", "256MiB"]
    messenger = pool.add("d", *disk, "--grace", "20")
    data = {f"k{i}": pattern(f"k{i}", MIB)[:MIB] for i in range(20)}  # less than what is written behind
    with pool.client("d") as client:
        client.batch_put(list(data), list(data.values()))
        assert client.stats().disk_objects == 0
    assert messenger.end() == 0
    pool.add("d", *disk)
    with pool.client("d") as client:
        assert [client.get(k) for k in data] == list(data.values())


@pytest.mark.parametrize("tcp", [False, True], ids=["shared-memory", "tcp"])
def test_d12_sixteen_readers_during_a_graceful_stop_get_right_bytes_or_typed_errors(pool: Pool, tcp: bool) -> None:
    keys = [f"key-{i}" for i in range(20)]
    size = MIB
    with pool.client("m0") as client:
        assert all(r is Put.STORED for r in client.batch_put(keys, [pattern(k, size)[:size] for k in keys]))
    wrong: list[object] = []
    good = [0] * READERS
    ended = threading.Event()

    def read(index: int) -> None:
        with pool.tcp_client() if tcp else pool.client("m0") as mine:
            out = bytearray(size)
            while not ended.is_set():
                for key in keys:
                    try:
                        [got] = mine.batch_get_into([key], [out])
                    except MoonpoolError:
                        continue
                    if isinstance(got, MoonpoolError):
                        continue
                    if out != pattern(key, size)[:size]:
                        wrong.append((index, key))
                    good[index] += 1

    threads = [threading.Thread(target=read, args=(i,)) for i in range(READERS)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: all(good), timeout_s=60)
    status = pool.m0.end(signal.SIGTERM)
    ended.set()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert status == 0


CLIENT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
import sys
from moonpool.store.client import PoolClient
master, home, shared = sys.argv[1:]
pool = PoolClient.connect(master, messenger=home, shared_memory=shared == "shared")
keys = [f"k{i}" for i in range(24)]
print("begins", flush=True)
while True:
    pool.batch_get_into(keys, [bytearray(2 << 20) for _ in keys])
"""


@pytest.mark.parametrize("state", ["shared", "tcp", "frozen master", "frozen messenger"])
def test_e6_sigint_ends_a_client_within_five_seconds(pool: Pool, state: str) -> None:
    with pool.client("m0") as client:
        client.batch_put([f"k{i}" for i in range(24)], [bytes(2 * MIB)] * 24)
        [listen] = [i.listen for i in client.messengers() if i.name == "m0"]
    home = listen if state == "tcp" else str(pool.folder / "m0")
    arguments = [sys.executable, "-c", CLIENT, pool.master, home, "shared" if state != "tcp" else "tcp"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begins\n"
        frozen = {"frozen master": pool.processes[0], "frozen messenger": pool.m0}.get(state)
        if frozen:
            frozen.process.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(10) in (-signal.SIGINT, 130, 1)
            assert time.monotonic() - start < 5
        finally:
            process.kill()
            if frozen:
                frozen.process.send_signal(signal.SIGCONT)
