"""`moonpool drain`: let a messenger take nothing new, and move what it holds to the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Self

import msgspec

from moonpool.errors import ConnectionLost, MoonpoolError, NativeExists, NotFound
from moonpool.store.peers import addresses_of, host_id
from moonpool.types import MessengerInfo, TaskStatus
from moonpool.wire import messages as m
from moonpool.wire.auth import Security
from moonpool.wire.rpc import SocketChannel

_CALL_S = 10.0
_PAGE = 256
_LOOK_S = 0.02
_STUCK_S = 60.0
"""A batch that does not get on for so long is given up."""


class Report(msgspec.Struct, kw_only=True):
    """So far. `failed`: why, and how many objects stay for it."""

    moved: int = 0
    nbytes: int = 0
    failed: dict[str, int] = msgspec.field(default_factory=dict)
    writing: int = 0
    """Reservations still open there at the end."""

    @property
    def empty(self) -> bool:
        return not self.failed and not self.writing


class _Dialer:
    """Opens connections, and closes all of them together."""

    def __init__(self, security: Security) -> None:
        self._security, self._here, self._open = security, host_id(), ExitStack()

    def open(self, address: str) -> SocketChannel:
        return self._open.enter_context(closing(SocketChannel(address, _CALL_S, security=self._security)))

    def reach(self, info: MessengerInfo, tenant: str = "") -> SocketChannel:
        """A session of this tenant with a messenger. Raises WireError."""
        failed: MoonpoolError = ConnectionLost("no address reaches it from this machine", key=info.name)
        for address in addresses_of(info, self._here):
            try:
                channel = self.open(address)
                if channel.call(m.Hello(tenant), m.Welcome).name == info.name:
                    return channel
                failed = ConnectionLost("another messenger is at its address", key=info.name, have=address)
            except MoonpoolError as e:
                failed = e
        raise failed

    def close(self) -> None:
        self._open.close()


class Emptying:
    """One messenger, the source, and those that take what it holds. Close it after use."""

    def __init__(self, master: str, name: str, security: Security = Security()) -> None:
        """Raises NotFound for a messenger that the master does not know, WireError."""
        self.master, self.name, self.security = master, name, security
        self._dialer = _Dialer(security)
        try:
            found = self._dialer.open(master).call(m.ListMessengers(), m.Messengers).messengers
            infos = {i.name: i for i in found}
            if name not in infos:
                raise NotFound("no such messenger", key=name, have=", ".join(sorted(infos)) or "none")
            self.info = infos.pop(name)
            self._source = self._dialer.reach(self.info)
            self.others = {n: i for n, i in infos.items() if not i.draining}
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._dialer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop_puts(self, on: bool = True) -> None:
        """Raises NotFound if nobody else takes objects, AccessDenied."""
        if on and not self.others:
            raise NotFound(
                "no other messenger takes objects", key=self.name, fix="Start one, or stop this one as it is."
            )
        self._source.call(m.Drain(on), m.Done)

    def held(self) -> int:
        """Bytes there now, in memory and on disk."""
        stats = self._source.call(m.GetStats(), m.Stats).stats
        return stats.used + stats.disk_used

    def run(self, progress: Callable[[Report], None] = lambda _: None) -> Report:
        """After `stop_puts`: move everything; what does not fit elsewhere stays, and is counted. `progress` hears of every step.

        Raises AccessDenied, WireError.
        """
        report = Report()
        for tenant in self._source.call(m.ListTenants(), m.Tenants).names:
            with closing(_Dialer(self.security)) as dialer:
                _TenantMoves(self, dialer, tenant, report, progress).run()
        report.writing = self._source.call(m.GetStats(), m.Stats).stats.writes_open
        return report


class _TenantMoves:
    """One tenant's objects: sessions of that tenant with everybody."""

    def __init__(
        self, of: Emptying, dialer: _Dialer, tenant: str, report: Report, progress: Callable[[Report], None]
    ) -> None:
        self._report, self._progress, self._from, self._infos = report, progress, of.info, of.others
        self._source = dialer.reach(of.info, tenant)
        self._master = dialer.open(of.master)
        self._master.call(m.Hello(tenant), m.Registered)
        self._targets = {name: dialer.reach(info, tenant) for name, info in of.others.items()}
        self._free = {name: info.capacity - info.used for name, info in of.others.items()}

    def run(self) -> None:
        tried: set[str] = set()
        while keys := [k for k in self._listed() if k not in tried]:
            tried.update(keys)
            for start in range(0, len(keys), _PAGE):
                for target, some in self._shares(keys[start : start + _PAGE]).items():
                    for status in self._moved(target, some):
                        self._count(status)

    def _listed(self) -> list[str]:
        keys: list[str] = []
        page = self._source.call(m.ListKeys(m.MAX_BATCH, restart=True), m.KeyPage).keys
        while page:
            keys += page
            page = self._source.call(m.ListKeys(m.MAX_BATCH), m.KeyPage).keys
        return keys

    def _shares(self, keys: Sequence[str]) -> dict[str, list[str]]:
        """Which target gets which: the one with most room among those without a copy; if all have one, any, which costs nothing."""
        holders = self._master.call(m.Locate(list(keys)), m.Located).holders
        items = self._source.call(m.DescribeObjects(list(keys)), m.Descriptions).items
        shares: dict[str, list[str]] = {}
        for key, there, item in zip(keys, holders, items, strict=True):
            target = max(self._free, key=lambda name: (name not in there, self._free[name]))
            if target not in there:
                self._free[target] -= item.size if item else 0
            shares.setdefault(target, []).append(key)
        return shares

    def _moved(self, target: str, keys: list[str]) -> Iterator[TaskStatus]:
        channel = self._targets[target]
        ids = channel.call(m.Pull(keys, self._from, True), m.Started).ids
        for task in ids:
            yield _finished(channel, task)

    def _count(self, status: TaskStatus) -> None:
        report = self._report
        if status.state == "done":
            report.moved += 1
            report.nbytes += status.total
        elif not any(e in status.error for e in _NO_LOSS):
            why = status.error.replace(f"{status.key}: ", "").partition(";")[0]
            report.failed[why] = report.failed.get(why, 0) + 1
        self._progress(report)


_NO_LOSS = (NotFound.__name__, NativeExists.__name__)
"""It went meanwhile; or it is a converted page, and the native one is there."""


def _finished(channel: SocketChannel, task: str) -> TaskStatus:
    """Wait for the end of a task, or until it has not got on for `_STUCK_S`."""
    last, since = None, time.monotonic()
    while True:
        status = channel.call(m.GetTask(task), m.Task).status
        if status.state in ("done", "failed"):
            return status
        if (seen := (status.state, status.done)) != last:
            last, since = seen, time.monotonic()
        elif time.monotonic() - since > _STUCK_S:
            return msgspec.structs.replace(status, state="failed", error=f"Stuck: no progress within {_STUCK_S:g} s")
        time.sleep(_LOOK_S)
