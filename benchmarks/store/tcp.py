"""Between two network namespaces, as between two hosts: the client here, the holder of the segment there.

The limit is what iperf3 carries over the same pair of interfaces, with one stream or two, whichever is more.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from benchmarks import figures
from benchmarks.store import network
from benchmarks.store.plan import Plan
from benchmarks.store.rounds import Samples, alternate, faster
from benchmarks.store.sides import Sides
from benchmarks.store.speed import batches

_SIZE = 1 << 20
_CALLS = ("put", "get")


def tcp(plan: Plan) -> dict[str, object]:
    """1 MiB pages in batches of 128, put there and got from there."""
    with ExitStack() as stack:
        there, here, address = stack.enter_context(network.neighbour())
        sides = stack.enter_context(Sides(plan.peer))
        measures: dict[str, Callable[[int], Mapping[str, float]]] = {}
        if shutil.which("iperf3"):
            measures["iperf3"] = _iperf(there, address, (256 if plan.quick else 2048) << 20)
        measures["ours"] = batches(sides.ours_remote(there, address, plan.segment, plan.buffer), _SIZE, plan)
        if sides.has_peer:
            master = sides.peer_master(here)
            sides.peer_client(master, plan.segment, 0, there, address)
            measures["peer"] = batches(sides.peer_client(master, 0, plan.buffer, (), here), _SIZE, plan)
        samples = alternate(measures, plan.rounds)
    figures.show(
        "TCP between two network namespaces, batches of 128 × 1m, GiB/s",
        [(name, *(row.text(c) for c in _CALLS)) for name, row in samples.items()],
        ("side", *_CALLS),
    )
    return ratios(samples)


def ratios(samples: Mapping[str, Samples]) -> dict[str, object]:
    """The worse of put and get counts."""
    found: dict[str, object] = {f"tcp_1m_{c}_gib_s_{n}": row.median(c) for n, row in samples.items() for c in _CALLS}
    for figure, other in (("tcp_1m_vs_iperf", "iperf3"), ("tcp_1m_vs_peer", "peer")):
        if other in samples:
            found[figure] = min(faster(samples["ours"], samples[other], c) for c in _CALLS)
    return found


def _iperf(there: list[str], address: str, volume: int) -> Callable[[int], dict[str, float]]:
    def measure(_: int) -> dict[str, float]:
        return {
            "put": max(_carried(there, address, volume, streams, []) for streams in (1, 2)),
            "get": max(_carried(there, address, volume, streams, ["--reverse"]) for streams in (1, 2)),
        }

    return measure


def _carried(there: list[str], address: str, volume: int, streams: int, more: list[str]) -> float:
    """GiB/s that the receiver got, over `volume` bytes."""
    server = subprocess.Popen(
        [*there, "iperf3", "--server", "--one-off", "--bind", address, "--forceflush"],
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        assert server.stdout
        while "listening" not in (line := server.stdout.readline()):
            assert line, "iperf3 does not start"
        command = ["iperf3", "--client", address, "--bytes", str(volume), "--parallel", str(streams), "--json", *more]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        server.stdout.read()
    return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 8 / (1 << 30)
