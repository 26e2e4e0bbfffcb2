"""Network namespaces of our own. The peer's ports cannot be bound to loopback alone, so it runs where there is nothing else.

A namespace lives as long as a process in it, so nothing is left behind however the benchmark ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_INSIDE = "MOONPOOL_BENCH_INSIDE"


def inside() -> bool:
    """Whether `enter` has been."""
    return _INSIDE in os.environ


def enter(module: str, arguments: list[str], *, boost: bool) -> int:
    """Run `python -m module arguments` in a namespace with nothing but loopback; returns its exit status.

    `boost` gives the whole session more of the processors than other work on this machine gets (root only).
    """
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    command = [*unshare, sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command, env={**os.environ, _INSIDE: "1", "MC_TCP_BIND_ADDRESS": "127.0.0.1"}, start_new_session=boost
    ).returncode


def begin(*, boost: bool) -> None:
    """First thing inside: bring loopback up."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    if boost:
        with suppress(OSError):  # needs root and autogroups; without them the figures are only noisier
            Path("/proc/self/autogroup").write_text("-15")


@contextmanager
def neighbour() -> Iterator[tuple[list[str], str, str]]:
    """A second namespace behind a veth pair: (prefix for commands that run there, our address, its address)."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    try:
        _wait_for_own_namespace(holder.pid)
        there = ["nsenter", "--net", "--target", str(holder.pid)]
        for command in (
            ["ip", "link", "add", "bench0", "type", "veth", "peer", "name", "bench1", "netns", str(holder.pid)],
            ["ip", "addr", "add", "10.77.0.1/24", "dev", "bench0"],
            ["ip", "link", "set", "bench0", "up"],
            [*there, "ip", "addr", "add", "10.77.0.2/24", "dev", "bench1"],
            [*there, "ip", "link", "set", "bench1", "up"],
            [*there, "ip", "link", "set", "lo", "up"],
        ):
            subprocess.run(command, check=True)
        yield there, "10.77.0.1", "10.77.0.2"
    finally:
        holder.kill()
        holder.wait()
        subprocess.run(["ip", "link", "del", "bench0"], check=False, stderr=subprocess.DEVNULL)


def _wait_for_own_namespace(pid: int) -> None:
    from moonpool.testing.leaks import eventually

    mine = os.readlink("/proc/self/ns/net")  # noqa: PTH115 - its target is no path
    assert eventually(lambda: os.readlink(f"/proc/{pid}/ns/net") != mine)  # noqa: PTH115
