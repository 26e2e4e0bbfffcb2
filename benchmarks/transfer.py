"""TCP transfers between two network namespaces against iperf3: `python -m benchmarks.transfer` (needs root and iperf3).

    tcp_1m_{read,write}_gib_s     batches of 128 pages of 1 MiB between two processes, one in each namespace
    tcp_1m_{read,write}_vs_iperf  that ÷ what iperf3 carries there (the better of 1 and 2 streams), in the same run
    tcp_1m_vs_iperf               the smaller of the two
    tcp_4k_batch_us               a batch of 128 pages of 4 KiB
    tcp_4k_us                     one page of 4 KiB

Rounds alternate between the contestants; each figure is the median over the rounds, each ratio the median of the rounds' ratios.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks import figures
from moonpool.transfer import Op, Registry, TransferClient, TransferServer
from moonpool.transfer.segment import Segment

PAGES, PAGE = 128, 1 << 20
SMALL = 4 << 10
ROUNDS = int(os.environ.get("ROUNDS", "7"))
SECONDS = int(os.environ.get("SECONDS_EACH", "1"))
"""How long each contestant runs in a round."""
SERVER, CLIENT = "moonpool-bench-a", "moonpool-bench-b"
ADDRESS = "10.231.77.1"
PORT, IPERF_PORT = 7701, 7702


def main() -> None:
    if reason := _why_not():
        print(f"skipped: {reason}")
        return
    with (
        _namespaces(),
        _running(SERVER, "-m", "benchmarks.transfer", "serve"),
        _running(CLIENT, "-m", "benchmarks.transfer", "client") as client,
    ):
        rounds = [_round(lambda *words: _ask(client, *words)) for _ in range(ROUNDS)]
    found = _summary(rounds)
    rows = [(name, f"{value:.3f}") for name, value in found.items()]
    figures.show(f"{ROUNDS} rounds of {SECONDS} s each, {PAGES} pages a batch", rows, ("figure", "value"))
    print(figures.write("transfer", found))


def _why_not() -> str:
    if os.geteuid():
        return "network namespaces need root"
    if missing := [tool for tool in ("iperf3", "ip") if not shutil.which(tool)]:
        return f"{' and '.join(missing)} not installed"
    if subprocess.run(["ip", "netns", "add", SERVER], capture_output=True).returncode:
        return "this machine makes no network namespaces"
    subprocess.run(["ip", "netns", "del", SERVER], check=True)
    return ""


def _round(ask: Callable[..., float]) -> dict[str, float]:
    found = {f"iperf{n}": _iperf(n) for n in (1, 2)}
    found |= {kind: ask(kind) for kind in ("read", "write")}
    return found | {"tcp_4k_batch_us": ask("small", str(PAGES)), "tcp_4k_us": ask("small", "1")}


def _summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    found = {f"iperf3_{n}_gib_s": _median(r[f"iperf{n}"] for r in rounds) for n in (1, 2)}
    for kind in ("read", "write"):
        found[f"tcp_1m_{kind}_gib_s"] = _median(r[kind] for r in rounds)
        found[f"tcp_1m_{kind}_vs_iperf"] = _median(r[kind] / max(r["iperf1"], r["iperf2"]) for r in rounds)
    found["tcp_1m_vs_iperf"] = min(found["tcp_1m_read_vs_iperf"], found["tcp_1m_write_vs_iperf"])
    return found | {name: _median(r[name] for r in rounds) for name in ("tcp_4k_batch_us", "tcp_4k_us")}


def _median(values: Iterator[float]) -> float:
    return statistics.median(list(values))


# -- the two namespaces and what runs in them


@contextmanager
def _namespaces() -> Iterator[None]:
    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    ip("netns", "add", SERVER)
    ip("netns", "add", CLIENT)
    try:
        ip("link", "add", "mpa", "netns", SERVER, "type", "veth", "peer", "name", "mpb", "netns", CLIENT)
        for space, link, address in ((SERVER, "mpa", ADDRESS), (CLIENT, "mpb", "10.231.77.2")):
            ip("-n", space, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", space, "link", "set", link, "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield
    finally:
        ip("netns", "del", SERVER)
        ip("netns", "del", CLIENT)


@contextmanager
def _running(space: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A Python in `space`, once it has said that it is ready."""
    command = ["ip", "netns", "exec", space, sys.executable, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def _ask(process: subprocess.Popen[str], *words: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    print(*words, file=process.stdin, flush=True)
    return float(process.stdout.readline())


def _iperf(streams: int) -> float:
    """GiB/s."""
    inside = ["ip", "netns", "exec"]
    server = [*inside, SERVER, "iperf3", "-s", "-1", "-p", str(IPERF_PORT), "--forceflush"]
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as listening:
        assert listening.stdout is not None
        while "listening" not in listening.stdout.readline():
            pass
        client = [
            *inside,
            CLIENT,
            "iperf3",
            "-c",
            ADDRESS,
            "-p",
            str(IPERF_PORT),
            "-J",
            "-t",
            str(SECONDS),
            "-P",
            str(streams),
        ]
        report = json.loads(subprocess.run(client, capture_output=True, check=True, timeout=SECONDS + 20).stdout)
        listening.stdout.read()
    return float(report["end"]["sum_received"]["bits_per_second"]) / 8 / (1 << 30)


def _serve() -> None:
    registry = Registry()
    segment = Segment.create(2 * PAGES * PAGE)
    segment.view[:] = os.urandom(1 << 20) * (segment.size >> 20)
    region = registry.register(segment.view, fd=segment.fd)
    server = TransferServer(registry)
    listener = socket.create_server((ADDRESS, PORT))
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if connection.recv(1) == b"?":  # what is the region called?
            with connection:
                connection.sendall(f"{region.id} {region.generation}".encode())
        else:
            threading.Thread(target=server.serve, args=(connection,), daemon=True).start()


def _client() -> None:
    with socket.create_connection((ADDRESS, PORT)) as s:
        s.sendall(b"?")
        region, generation = map(int, s.recv(100).split())

    def connect() -> socket.socket:
        connection = socket.create_connection((ADDRESS, PORT))
        connection.sendall(b"d")
        return connection

    local = memoryview(mmap.mmap(-1, 2 * PAGES * PAGE))  # begins at a page, as engines' buffers do
    local[:] = os.urandom(1 << 20) * (len(local) >> 20)
    client = TransferClient(connect, streams=int(os.environ.get("STREAMS", "2")))

    def ops(kind: str, count: int, size: int, at: int) -> list[Op]:
        at *= PAGES * PAGE
        return [
            Op("write" if kind == "write" else "read", region, generation, at + i * size, local[at + i * size :][:size])
            for i in range(count)
        ]

    print("ready", flush=True)
    for line in sys.stdin:
        kind, *rest = line.split()
        count, size = (int(rest[0]), SMALL) if kind == "small" else (PAGES, PAGE)
        halves = [ops(kind, count, size, at) for at in (0, 1)]
        batches, start = 0, time.perf_counter()
        while (taken := time.perf_counter() - start) < SECONDS:
            assert client.run(halves[batches % 2], timeout=10) == [size] * count
            batches += 1
        print(1e6 * taken / batches if kind == "small" else batches * PAGES * PAGE / taken / (1 << 30), flush=True)


if __name__ == "__main__":
    {"": main, "serve": _serve, "client": _client}[" ".join(sys.argv[1:])]()
