"""After the storm: what a pool must look like when everybody who used it is gone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults import content
from moonpool.errors import MoonpoolError
from moonpool.store.client import PoolClient
from moonpool.store.links import MessengerLink
from moonpool.store.messenger.allocator import rounded
from moonpool.testing.cluster import LocalCluster, Node
from moonpool.testing.leaks import eventually
from moonpool.types import PoolStats, Put
from moonpool.wire import messages as m

_PAGE = 4096


def holdings(pid: int) -> Counter[str]:
    """Threads, descriptors by kind, and shared mappings of a process."""
    found: Counter[str] = Counter(threads=len(list(Path(f"/proc/{pid}/task").iterdir())))
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[f"fd {str(entry.readlink()).split(':[')[0]}"] += 1
        except OSError:
            continue  # closed meanwhile
    maps = Path(f"/proc/{pid}/maps").read_text()
    found["shared mappings"] = maps.count("memfd:moonpool")
    return found


def keys_at(link: MessengerLink) -> Iterator[str]:
    page = link.channel.call(m.ListKeys(_PAGE, restart=True), m.KeyPage).keys
    while page:
        yield from page
        page = link.channel.call(m.ListKeys(_PAGE), m.KeyPage).keys


class Held(dict[tuple[str, str], int]):
    """What one messenger holds in memory: (tenant, key) → bytes of space. `listed` has what is on disk too."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.listed: set[tuple[str, str]] = set()
        for tenant in content.TENANTS:
            link = MessengerLink.open(node.socket, tenant=tenant)
            try:
                keys = list(keys_at(link))
                described = link.channel.call(m.DescribeObjects(keys), m.Descriptions).items
                self.stats: PoolStats = link.channel.call(m.GetStats(), m.Stats).stats
            finally:
                link.close()
            self.listed |= {(tenant, k) for k in keys}
            self.update(
                {(tenant, k): rounded(d.size) for k, d in zip(keys, described, strict=True) if d and d.in_memory}
            )


def balance(node: Node, timeout_s: float) -> tuple[int, str]:
    """Open handles that are left at this messenger, and what does not add up."""
    last: list[Held] = []

    def settled() -> bool:
        last[:] = [Held(node)]
        stats = last[0].stats
        return not stats.reads_open and not stats.writes_open and stats.used == sum(last[0].values())

    if eventually(settled, timeout_s=timeout_s):
        return 0, ""
    stats, objects = last[0].stats, sum(last[0].values())
    pins = stats.reads_open + stats.writes_open
    return pins, f"{node.name}: {stats.used} B used, objects {objects} B, {pins} open"


def index_faults(cluster: LocalCluster) -> list[str]:
    """Where the master's index and the messengers differ."""
    held = {node.name: Held(node).listed for node in cluster.messengers}
    wrong = []
    for tenant in content.TENANTS:
        with PoolClient.connect(cluster.master.socket, messenger=cluster.messengers[0].socket, tenant=tenant) as pool:
            located = pool._peers.holders(content.EVERY)
        for key, names in zip(content.EVERY, located, strict=True):
            there = sorted(name for name, keys in held.items() if (tenant, key) in keys)
            if there != names:
                wrong.append(f"{tenant}:{key} is at {there}, the index says {names}")
    return wrong


def unreadable(pool: PoolClient, tenant: str) -> tuple[list[str], list[str]]:
    """Keys that are listed and cannot be read; and what is wrong with those that can."""
    listed = list(pool.keys())
    values = {k: pool.batch_get([k])[0] for k in listed}  # not in one batch: what is on disk needs memory to come up to
    faults = [(k, content.fault_in(tenant, k, v)) for k, v in values.items() if v is not None]
    return [k for k, v in values.items() if v is None], [f"{k}: {f}" for k, f in faults if f]


def stuck(pool: PoolClient, tenant: str, timeout_s: float) -> list[str]:
    """Keys that cannot be removed, put anew and read, within `timeout_s`."""
    end = time.monotonic() + timeout_s
    left = dict.fromkeys(content.EVERY, "not tried")
    while left and time.monotonic() < end:
        for key in list(left):
            name = content.whole(tenant, key)
            value = content.versioned(name, 1) if key in content.VERSIONED else content.plain(name)
            try:
                pool.remove(key, force=True)
                [outcome] = pool.batch_put([key], [value])
                if outcome is Put.STORED and pool.get(key) == value:
                    del left[key]
                    pool.remove(key, force=True)
                else:
                    left[key] = str(outcome)
            except MoonpoolError as e:
                left[key] = repr(e)
    return [f"{k}: {why}" for k, why in left.items()]
