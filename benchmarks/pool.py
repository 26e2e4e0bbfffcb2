"""The pool against memcpy: `make bench-pool`.

    <mode>_<call>_fraction   bytes/s of the call ÷ bytes/s of a plain copy into (or out of) the same kind of memory, in this run

Modes: `embedded` (one process) and `process` (messenger in another process, bytes through shared memory).
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from benchmarks import figures
from moonpool.store.base import KVPool
from moonpool.store.embedded import EmbeddedPool
from moonpool.testing.cluster import LocalCluster

PAGES, SIZE = 64, 256 << 10
CAPACITY = 256 << 20


def main() -> None:
    buffers = [np.random.default_rng(i).integers(0, 255, SIZE, dtype=np.uint8) for i in range(PAGES)]
    limits = copy_seconds(buffers)
    found: dict[str, float] = {}
    with EmbeddedPool(CAPACITY) as pool:
        found.update(measure("embedded", pool, buffers, limits))
    with LocalCluster(capacity=CAPACITY) as cluster:
        found.update(measure("process", cluster.client(), buffers, limits))
    rows = [(name, f"{value:.3f}") for name, value in found.items()]
    figures.show(f"{PAGES} pages of {SIZE >> 10} KiB a call", rows, ("figure", "value"))
    print(figures.write("bench-pool", found))


def copy_seconds(buffers: list[np.ndarray]) -> dict[str, float]:
    """Plain copies into and out of touched shared memory: what the hardware allows."""
    fd = os.memfd_create("bench")
    os.ftruncate(fd, PAGES * SIZE)
    shared = np.frombuffer(mmap.mmap(fd, PAGES * SIZE), dtype=np.uint8).reshape(PAGES, SIZE)
    outs = [np.zeros(SIZE, dtype=np.uint8) for _ in range(PAGES)]

    def into() -> None:
        for row, buffer in zip(shared, buffers, strict=True):
            row[:] = buffer

    def out_of() -> None:
        for row, buffer in zip(shared, outs, strict=True):
            buffer[:] = row

    times = {"put": figures.seconds(into, 15), "get": figures.seconds(out_of, 15)}
    os.close(fd)
    return times


def measure(mode: str, pool: KVPool, buffers: list[np.ndarray], limits: dict[str, float]) -> dict[str, float]:
    keys = [f"page-{i}" for i in range(PAGES)]
    outs = [np.zeros(SIZE, dtype=np.uint8) for _ in range(PAGES)]

    def put() -> None:
        pool.batch_remove(keys)
        pool.batch_put_from(keys, buffers)

    def get() -> None:
        pool.batch_get_into(keys, outs)

    def view() -> None:
        pool.open_read(keys).close()

    put_s, get_s, view_s = figures.seconds(put, 15), figures.seconds(get, 15), figures.seconds(view, 15)
    assert all((a == b).all() for a, b in zip(buffers, outs, strict=True))
    gib = PAGES * SIZE / (1 << 30)
    return {
        f"{mode}_put_gib_s": gib / put_s,
        f"{mode}_put_fraction": limits["put"] / put_s,
        f"{mode}_get_gib_s": gib / get_s,
        f"{mode}_get_fraction": limits["get"] / get_s,
        f"{mode}_open_read_us_per_page": 1e6 * view_s / PAGES,
    }


if __name__ == "__main__":
    main()
