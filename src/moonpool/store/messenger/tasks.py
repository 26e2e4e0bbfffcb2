"""Copies and moves between messengers, made by the one that gets the bytes: it pulls them from the other's memory.

One thread works through a bounded queue. A move removes the other's copy only when ours is visible.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import msgspec

from moonpool.errors import ConnectionLost, LeaseExpired, MoonpoolError, NoSpace, NotFound
from moonpool.store.links import MessengerLink
from moonpool.transfer.segment import Segment
from moonpool.types import MessengerInfo, PutOptions, TaskStatus
from moonpool.wire import messages as m

_QUEUED = 65536
_KEPT = 4096
"""Finished tasks that can still be asked for."""
_PIECE = 16 << 20
"""Bytes copied between two reports of progress."""


class Receiver(Protocol):
    """The messenger that gets the bytes, as seen from its own process."""

    name: str
    segment: Segment

    def open_session(self) -> int: ...
    def handle(self, session: int, request: m.Message) -> m.Message: ...
    def close_session(self, session: int) -> None: ...


class _Job(msgspec.Struct, frozen=True):
    task: str
    tenant: str
    source: MessengerInfo


class Tasks:
    """Runs from construction to `close`. `connect(messenger, tenant)` opens a link to another messenger."""

    def __init__(self, receiver: Receiver, connect: Callable[[MessengerInfo, str], MessengerLink]) -> None:
        self._receiver, self._connect = receiver, connect
        self._status: OrderedDict[str, TaskStatus] = OrderedDict()
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_QUEUED)
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tasks", daemon=True)
        self._thread.start()

    def start(self, tenant: str, request: m.Pull) -> list[str]:
        """Ids of the new tasks. Raises NoSpace if too many are waiting."""
        ids = []
        for key in request.keys:
            with self._lock:
                task = str(next(self._ids))
                self._status[task] = TaskStatus(
                    id=task,
                    kind="move" if request.move else "copy",
                    key=key,
                    source=request.source.name,
                    targets=(self._receiver.name,),
                    state="pending",
                )
                self._forget_oldest()
            try:
                self._jobs.put_nowait(_Job(task, tenant, request.source))
            except queue.Full:
                self._set(task, state="failed", error="too many tasks are waiting")
                raise NoSpace("too many tasks are waiting", key=key, need=f"<= {_QUEUED}") from None
            ids.append(task)
        return ids

    def _forget_oldest(self) -> None:
        while len(self._status) > _QUEUED + _KEPT:
            self._status.popitem(last=False)

    def status(self, task: str) -> TaskStatus:
        """Raises NotFound."""
        with self._lock:
            if task not in self._status:
                raise NotFound("no such task", key=task)
            return self._status[task]

    def _set(self, task: str, **changes: object) -> None:
        with self._lock:
            if task in self._status:
                self._status[task] = msgspec.structs.replace(self._status[task], **changes)

    def close(self) -> None:
        """What has not begun does not begin any more."""
        self._stop.set()
        try:
            self._jobs.put_nowait(None)
        except queue.Full:
            pass  # the thread will see `_stop`
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._stop.is_set():
            self._set(job.task, state="running")
            try:
                self._do(job, self.status(job.task))
            except MoonpoolError as e:
                self._set(job.task, state="failed", error=f"{type(e).__name__}: {e}")
            else:
                self._set(job.task, state="done")

    def _do(self, job: _Job, status: TaskStatus) -> None:
        if status.source == self._receiver.name:
            return
        link = self._connect(job.source, job.tenant)
        try:
            self._pull(job, status, link)
        finally:
            link.close()

    def _pull(self, job: _Job, status: TaskStatus, link: MessengerLink) -> None:
        """Copy what is there now. If another takes its place meanwhile, the copy of the old one does not stay."""
        key, move = status.key, status.kind == "move"
        [found] = link.channel.call(m.DescribeObjects([key]), m.Descriptions).items
        opened = link.channel.call(m.OpenRead([key]), m.Opened)
        if found is None or opened.spans[0] is None:
            raise NotFound("the source does not have it (any more)", key=key)
        options = PutOptions(pin=found.pin, soft_pin_ttl_s=max(1e-3, found.pinned_for_s))
        offset, size = opened.spans[0]
        self._set(job.task, total=size)
        session = self._receiver.open_session()
        try:
            self._receiver.handle(session, m.Hello(job.tenant))
            reply = self._receiver.handle(session, m.Reserve([(key, size)], options))
            assert isinstance(reply, m.Reserved)
            match reply.spans([size])[0]:
                case m.Span(id=handle, offset=to):
                    self._copy(job, link, (offset, size), to)
                    link.channel.call(
                        m.Exist([key]), m.Flags
                    )  # it answers, so the session, and the read, were open till now
                    self._committed(session, handle)
                    mine = self._receiver.handle(session, m.OpenRead([key]))
                    current = link.channel.call(m.EndCopy(opened.lease, move), m.Flags).values[0]
                    assert isinstance(mine, m.Opened)
                    ours = mine.spans[0] == (to, size)
                    self._receiver.handle(session, m.EndCopy(mine.lease, ours and not current))
                    if not current:
                        raise LeaseExpired("another object took its place meanwhile", key=key)
                case m.Error() as e:
                    raise NoSpace(f"{e.name}: {e.fields.get('what', '')}", key=key)
                case m.Existed():
                    link.channel.call(m.EndCopy(opened.lease, move), m.Flags)
                    self._set(job.task, done=size)
        finally:
            self._receiver.close_session(session)

    def _copy(self, job: _Job, link: MessengerLink, span: tuple[int, int], to: int) -> None:
        (offset, size), done = span, 0
        while done < size:
            if self._stop.is_set():
                raise ConnectionLost("the messenger is closing")
            piece = min(_PIECE, size - done)
            out = self._receiver.segment.span(to + done, piece)
            [error] = link.memory.read_into([(offset + done, piece)], [out])
            if error:
                raise error
            done += piece
            self._set(job.task, done=done)

    def _committed(self, session: int, handle: int) -> None:
        reply = self._receiver.handle(session, m.Commit([handle]))
        assert isinstance(reply, m.Committed)
        if reply.results and isinstance(error := reply.results[0], m.Error):
            raise NoSpace(f"{error.name}: {error.fields.get('what', '')}")
