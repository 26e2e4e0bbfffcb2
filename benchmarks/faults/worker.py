"""One client process under load: `python -m benchmarks.faults.worker JSON`. It may be killed or frozen at any moment.

It appends what it finds to a file, a line each: `WRONG …`, `BROKEN …`, `LEFT …`, `OPS <more>`, `ERROR <class>`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.faults import content
from moonpool.errors import MoonpoolError, PoolClosed
from moonpool.store.base import Reservation
from moonpool.store.client import PoolClient
from moonpool.testing.leaks import Resources, eventually
from moonpool.types import Pin, Put, PutOptions
from moonpool.wire import messages as m
from moonpool.wire.rpc import SocketChannel

_GIVE_UP_S = 60.0
_THREADS = 3
"""They share one pool."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    seed: int
    master: str
    home: str
    """Name of the messenger."""
    far: bool
    tenant: str
    writes: tuple[str, ...]
    """Versioned keys that only this one replaces."""
    report: str


class Worker:
    def __init__(self, job: Job) -> None:
        self.job, self.random = job, random.Random(job.seed)
        self.out = Path(job.report).open("a", buffering=1)  # noqa: SIM115 - for the life of the process
        self.versions = Counter[str]()
        self.seen: Counter[str] = Counter()
        self.ops, self.stop = 0, False
        self.pool = self._join()
        self.actions: list[Callable[[], None]] = [
            *[self.put, self.get, self.get_into, self.hold, self.slow_put] * 3,
            *[self.remove, self.spread, self.look],
            *([self.replace] * 6 if job.writes else []),
        ]

    def say(self, kind: str, text: object) -> None:
        self.out.write(f"{kind} {self.job.number}: {text}\n")

    def _join(self) -> PoolClient:
        end = time.monotonic() + _GIVE_UP_S
        while True:
            try:
                return PoolClient.connect(
                    self.job.master, messenger=self._home(), tenant=self.job.tenant, shared_memory=not self.job.far
                )
            except MoonpoolError:
                if self.stop or time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def _home(self) -> str:
        """The home's address; over TCP its port is another after each start."""
        channel = SocketChannel(self.job.master, 2.0)
        try:
            found = channel.call(m.ListMessengers(), m.Messengers).messengers
        finally:
            channel.close()
        home = next((i for i in found if i.name == self.job.home), None)
        if home is None:
            raise MoonpoolError("not there yet", key=self.job.home)
        return home.listen if self.job.far else home.socket

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._end)
        before = _resources_without(self.pool)
        self.pool = self._join()
        helpers = [threading.Thread(target=self._work) for _ in range(_THREADS - 1)]
        for helper in helpers:
            helper.start()
        while not self.stop:
            self.step()
            if self.ops % 100 == 0 and self.job.far:  # its home may have another port by now
                self.pool.close()
                self.pool = self._join()
        for helper in helpers:
            helper.join()
        self.pool.close()
        if not eventually(lambda: not before.leaked(Resources.now()), timeout_s=5):
            self.say("LEFT", before.leaked(Resources.now()))

    def _work(self) -> None:
        while not self.stop:
            self.step()

    def _end(self, *_: object) -> None:
        self.stop = True

    def step(self) -> None:
        try:
            self.random.choice(self.actions)()
        except PoolClosed:
            time.sleep(0.05)  # another thread joins anew
        except MoonpoolError as e:
            self._note(e)
        except Exception as e:  # noqa: BLE001 - process edge: whatever else comes is a finding
            self.say("BROKEN", repr(e))
        self.ops += 1
        if self.ops % 50 == 0:
            self.say("OPS", 50)

    def _note(self, outcome: object) -> None:
        if isinstance(outcome, MoonpoolError):
            text = str(outcome)
            self.say("BROKEN" if "internal error" in text else "ERROR", f"{type(outcome).__name__} {text[:300]}")

    # -- what it does

    def some(self, most: int = 6) -> list[str]:
        return self.random.sample(content.EVERY, self.random.randint(1, most))

    def options(self) -> PutOptions:
        r = self.random
        return PutOptions(
            replicas=r.choice((1, 1, 2)),
            strict_replicas=r.random() < 0.5,
            pin=r.choice((Pin.NONE, Pin.NONE, Pin.SOFT)),
            soft_pin_ttl_s=r.choice((0.2, 5.0)),
        )

    def value(self, key: str) -> bytes:
        return content.plain(content.whole(self.job.tenant, key))

    def put(self) -> None:
        keys = [k for k in self.some() if k not in content.VERSIONED]
        pinned = [k for k in keys if k in content.PINNED]
        usual = [k for k in keys if k not in content.PINNED]
        if pinned:
            self._all(self.pool.batch_put(pinned, [self.value(k) for k in pinned], PutOptions(pin=Pin.HARD)))
        plain = self.random.random() < 0.5
        values = [self.value(k) for k in usual]
        if plain:
            self._all(self.pool.batch_put(usual, values))
        else:
            groups = tuple(self.random.choice(("", "g1", "g2")) for _ in usual)
            self._all(self.pool.batch_put(usual, values, msgspec.structs.replace(self.options(), groups=groups)))

    def _all(self, outcomes: list[Put | MoonpoolError]) -> None:
        for outcome in outcomes:
            self._note(outcome)

    def slow_put(self) -> None:
        """In two steps, with time in between to be killed in."""
        keys = [k for k in self.some(3) if k in content.PLAIN]
        got = self.pool.reserve([(k, len(self.value(k))) for k in keys], self.options())
        mine = [r for r in got if isinstance(r, Reservation)]
        for r in mine:
            half = len(r.view) // 2
            r.view[:half] = self.value(r.key)[:half]
        time.sleep(self.random.random() * 0.1)
        for r in mine:
            r.view[:] = self.value(r.key)
        if self.random.random() < 0.2:
            self.pool.revoke(mine)
        else:
            self._all(self.pool.commit(mine))

    def check(self, key: str, found: bytes | bytearray | memoryview | None, how: str) -> None:
        if found is not None and (wrong := content.fault_in(self.job.tenant, key, bytes(found))):
            self.say("WRONG", f"{key} by {how}: {wrong}")

    def get(self) -> None:
        keys = self.some()
        for key, found in zip(keys, self.pool.batch_get(keys), strict=True):
            self.check(key, found, "get")

    def get_into(self) -> None:
        keys = self.some()
        buffers = [bytearray(self.random.choice((100, 300_000, (1 << 20) + 8))) for _ in keys]
        for key, buffer, size in zip(keys, buffers, self.pool.batch_get_into(keys, buffers), strict=True):
            self.check(key, buffer[:size] if isinstance(size, int) else None, "get_into")

    def hold(self) -> None:
        """Open reads stay as they are, whatever happens meanwhile."""
        keys = self.some()
        with self.pool.open_read(keys) as lease:
            for when in ("at once", "later"):
                for key, view in zip(keys, lease.views, strict=True):
                    self.check(key, view, f"open_read, {when}")
                time.sleep(self.random.choice((0.0, 0.05, 0.1, 0.2, 3.0)))

    def remove(self) -> None:
        self.pool.batch_remove(self.some(3), force=self.random.random() < 0.3)

    def spread(self) -> None:
        [key] = self.some(1)
        target = self.random.choice(("m0", "m1", "m2"))
        task = self.pool.copy(key, [target]) if self.random.random() < 0.5 else self.pool.move(key, target)
        if self.random.random() < 0.5:
            self.pool.task(task)

    def look(self) -> None:
        keys = self.some()
        self.pool.batch_is_exist(keys)
        self.pool.replicas(keys)
        list(self.pool.keys())

    def replace(self) -> None:
        key = self.random.choice(self.job.writes)
        self.versions[key] += 1
        version = time.monotonic_ns() if self.versions[key] == 1 else self.seen[key] + 1
        self.seen[key] = version
        value = content.versioned(content.whole(self.job.tenant, key), version)
        self._note(self.pool.batch_put([key], [value], msgspec.structs.replace(self.options(), replace=True))[0])


def _resources_without(pool: PoolClient) -> Resources:
    """What this process has when it has no pool, but has had one: helpers that stay are there."""
    pool.batch_get(content.PLAIN)
    pool.close()
    return Resources.now()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    Worker(msgspec.json.decode(sys.argv[1], type=Job)).run()
