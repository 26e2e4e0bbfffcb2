"""The storm: who works, what is done to them, and what is found afterwards."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.faults import audit, content
from benchmarks.faults.worker import Job
from moonpool.testing.cluster import LocalCluster, Node
from moonpool.testing.leaks import eventually

CAPACITY, DISK = 8 << 20, 24 << 20
TTL_S = 3.0
EXPIRY_S = 2.0
LONG_S = 7.0
"""Longer than a client waits for a messenger."""
_END_S = 30.0
_FINDINGS = {"WRONG": "wrong bytes", "BROKEN": "broken calls", "LEFT": "left behind by clients"}


@dataclass
class Outcome:
    seed: int
    faults: int = 0
    seconds: float = 0.0
    operations: int = 0
    leaked_pins: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    findings: dict[str, list[str]] = field(
        default_factory=lambda: {
            name: []
            for name in (
                *_FINDINGS.values(),
                "did not end",
                "bytes without an object",
                "unreadable keys",
                "index faults",
                "stuck keys",
                "left behind by servers",
            )
        }
    )

    def bad(self) -> bool:
        return bool(self.leaked_pins) or any(self.findings.values())

    def figures(self) -> dict[str, object]:
        return {
            "faults": self.faults,
            "wrong_bytes": len(self.findings["wrong bytes"]),
            "leaked_pins": self.leaked_pins,
            "stuck_keys": len(self.findings["stuck keys"]),
        }


class Client:
    """A worker process that is started again whenever it was killed."""

    def __init__(self, job: Job, log: Path) -> None:
        self.job, self._log, self._starts = job, log, 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._starts += 1
        job = msgspec.structs.replace(self.job, seed=self.job.seed * 1000 + self._starts)
        command = [sys.executable, "-m", "benchmarks.faults.worker", msgspec.json.encode(job).decode()]
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    def send(self, number: signal.Signals) -> None:
        if self.process:
            self.process.send_signal(number)

    def end(self, number: signal.Signals, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Whether it ended in time. `meanwhile` is called again and again: others may be frozen that it waits for."""
        process, self.process = self.process, None
        if process is None:
            return True
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        end = time.monotonic() + _END_S
        while process.poll() is None and time.monotonic() < end:
            meanwhile()
            time.sleep(0.02)
        ended = process.poll() is not None
        process.kill()
        process.wait()
        return ended


class Storm:
    def __init__(self, cluster: LocalCluster, folder: Path, seed: int) -> None:
        self.cluster, self.folder, self.random = cluster, folder, random.Random(seed)
        self.report = folder / "findings"
        self.report.touch()
        self.clients = [self._client(i) for i in range(6)]
        self.thaws: list[tuple[float, Callable[[], None]]] = []
        self.frozen: set[int] = set()
        self.kinds: Counter[str] = Counter()

    def _client(self, number: int) -> Client:
        """Two that replace, one of them far; two far ones in all; two of another tenant."""
        writes = content.VERSIONED[: len(content.VERSIONED) // 2] if number == 0 else content.VERSIONED[12:]
        job = Job(
            number=number,
            seed=self.random.randrange(1 << 20),
            master=self.cluster.master.socket,
            home=f"m{number % 3}",
            far=number in (1, 4),
            tenant="t" if number in (3, 5) else "",
            writes=tuple(writes) if number in (0, 1, 3) else (),
            report=str(self.report),
        )
        return Client(job, self.folder / f"client{number}.log")

    def _thaw_due(self, at: float) -> None:
        for when, thaw in list(self.thaws):
            if when <= at:
                thaw()
                self.thaws.remove((when, thaw))

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            self._thaw_due(now)
            time.sleep(0.02)

    def strike(self) -> None:
        """One fault. Who is frozen is left alone until it goes on."""
        targets: list[tuple[str, Node | Client]] = [
            *[("client", c) for c in self.clients],
            *[("messenger", n) for n in self.cluster.messengers * 2],
            *[("master", self.cluster.master)] * 3,
        ]
        name, target = self.random.choice([t for t in targets if id(t[1]) not in self.frozen])
        kind = self.random.choice(("kill", "kill", "freeze", "freeze", "end"))
        self.kinds[f"{name}: {kind}"] += 1
        if kind == "freeze":
            self._freeze(target)
        elif isinstance(target, Client):
            number = signal.SIGKILL if kind == "kill" else signal.SIGTERM
            if not target.end(number, lambda: self._thaw_due(time.monotonic())):
                self.report.open("a").write(f"LEFT {target.job.number}: did not end\n")
            target.start()
        else:
            target.end(signal.SIGKILL if kind == "kill" else signal.SIGTERM)
            self.wait(self.random.choice((0.0, 0.0, 0.5)))
            target.start()

    def _freeze(self, target: Node | Client) -> None:
        if isinstance(target, Client):
            target.send(signal.SIGSTOP)
            thaw: Callable[[], None] = lambda: target.send(signal.SIGCONT)  # noqa: E731
        else:
            target.freeze()
            thaw = target.thaw
        self.frozen.add(id(target))

        def go_on() -> None:
            thaw()
            self.frozen.discard(id(target))

        self.thaws.append(
            (time.monotonic() + self.random.choice((0.05, 0.05, 0.3, 0.3, 0.3, 1.0, EXPIRY_S + 1, LONG_S)), go_on)
        )

    def calm(self) -> list[str]:
        """Everybody goes on, then the clients end. Those that do not."""
        self._thaw_due(float("inf"))
        self.wait(1.0)
        return [f"client {c.job.number}" for c in self.clients if not c.end(signal.SIGTERM)]


def run(faults: int, seed: int, *, keep: Path | None = None) -> Outcome:
    outcome = Outcome(seed)
    folder = Path(tempfile.mkdtemp(prefix="moonpool-faults-"))
    started = time.monotonic()
    cluster = LocalCluster(
        3, CAPACITY, expiry_s=EXPIRY_S, reservation_ttl_s=TTL_S, listen=True, disks=(1,), disk_capacity=DISK
    )
    try:
        with cluster:
            nodes = (cluster.master, *cluster.messengers)
            _warm(cluster)
            before = {node.name: audit.holdings(node.pid) for node in nodes}
            storm = Storm(cluster, folder, seed)
            try:
                _blow(storm, faults)
                outcome.findings["did not end"] += storm.calm()
            finally:
                for client in storm.clients:
                    client.end(signal.SIGKILL)
            outcome.kinds, outcome.faults = storm.kinds, faults
            _read_report(storm.report, outcome)
            _audit(cluster, outcome, before)
            if keep:
                shutil.copytree(cluster.folder, keep / "cluster", ignore=shutil.ignore_patterns("disk*", "*.sock*"))
    finally:
        if keep:
            shutil.copytree(folder, keep / "clients")
        shutil.rmtree(folder)
    outcome.seconds = time.monotonic() - started
    return outcome


def _warm(cluster: LocalCluster) -> None:
    """Threads that a disk tier starts when it first writes are no leak."""
    with contextlib.closing(cluster.client(1)) as pool:
        eventually(
            lambda: bool(pool.put(f"w{time.monotonic_ns()}", bytes(CAPACITY // 8))) and bool(pool.stats().disk_writes)
        )
        pool.remove_all()


def _blow(storm: Storm, faults: int) -> None:
    for client in storm.clients:
        client.start()
    storm.wait(2.0)
    for _ in range(faults):
        storm.strike()
        storm.wait(storm.random.uniform(0.1, 0.5))
    storm.wait(1.0)


def _read_report(report: Path, outcome: Outcome) -> None:
    for line in report.read_text().splitlines():
        kind, _, text = line.partition(" ")
        if kind in _FINDINGS:
            outcome.findings[_FINDINGS[kind]].append(text)
        elif kind == "OPS":
            outcome.operations += int(text.split()[1])
        elif kind == "ERROR":
            outcome.refusals[text.split()[1]] += 1


def _audit(cluster: LocalCluster, outcome: Outcome, before: dict[str, Counter[str]]) -> None:
    found = outcome.findings
    eventually(lambda: len(cluster.listed()) == len(cluster.messengers), timeout_s=_END_S)
    for node in cluster.messengers:
        pins, unbalanced = audit.balance(node, TTL_S + 10)
        outcome.leaked_pins += pins
        found["bytes without an object"] += [unbalanced] if unbalanced else []
    eventually(lambda: not audit.index_faults(cluster), timeout_s=_END_S)
    found["index faults"] += audit.index_faults(cluster)
    for tenant in content.TENANTS:
        for home in range(3):
            with contextlib.closing(cluster.client(home, tenant=tenant, far=home == 2)) as pool:
                missing, wrong = audit.unreadable(pool, tenant)
                found["unreadable keys"] += missing
                found["wrong bytes"] += wrong
                found["stuck keys"] += audit.stuck(pool, tenant, TTL_S + 10)
    for node in (cluster.master, *cluster.messengers):
        eventually(lambda n=node: not audit.holdings(n.pid) - before[n.name], timeout_s=_END_S)  # type: ignore[misc]
        if more := audit.holdings(node.pid) - before[node.name]:
            found["left behind by servers"].append(f"{node.name}: {dict(more)}")
