"""The sockets: subscribes to an instance's events and asks for what was missed. Everything else is in the pure parts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import zmq
import zmq.asyncio

from moonpool.conductor.events import codec
from moonpool.conductor.events.source import Action, Apply, Forget, Replay, Source
from moonpool.conductor.events.translate import REASONS, Translator
from moonpool.errors import ProtocolError

log = logging.getLogger(__name__)
_TICK_S = 0.5
_HELD = 100_000
ALARM_AFTER = 2000
"""Blocks that an instance has told of without one hit, before somebody is told."""


class Feed:
    """One instance's events. Made, started and closed on one event loop."""

    def __init__(self, name: str, events: str, replay: str, translator: Translator, clock: Callable[[], float]) -> None:
        self.name, self.translator, self._clock = name, translator, clock
        self._events, self._replay = events, replay
        self.sources: dict[int, Source] = {}
        self.bad = 0
        self.unknown: dict[str, int] = {}
        self.hits = 0
        """Lookups that found something there; counted by who looks up."""
        self._alarmed = False
        self._context = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []
        self._asker: zmq.asyncio.Socket | None = None

    def start(self) -> None:
        subscriber = self._context.socket(zmq.SUB)
        subscriber.set(zmq.RCVHWM, _HELD)
        subscriber.subscribe(b"")
        subscriber.connect(self._events)
        self._tasks = [asyncio.create_task(self._listen(subscriber)), asyncio.create_task(self._watch())]
        if self._replay:
            self._asker = self._context.socket(zmq.DEALER)
            self._asker.connect(self._replay)
            self._tasks.append(asyncio.create_task(self._answers(self._asker)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    @property
    def exact(self) -> bool:
        return bool(self.sources) and all(s.state == "exact" for s in self.sources.values())

    @property
    def alarm(self) -> str:
        """Why nothing may ever hit; empty while all is well."""
        t = self.translator
        if t.refused and not t.stored:
            return t.why_refused
        return (
            f"no hit after {t.stored} blocks; usual reasons: {'; '.join(REASONS)}"
            if t.stored >= ALARM_AFTER and not self.hits
            else ""
        )

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            with self._guarded():
                number, payload = codec.live(frames)
                batch = self._decoded(payload)
                await self._do(batch.rank, self._source(batch.rank).live(number, batch, self._clock()))

    async def _answers(self, socket: zmq.asyncio.Socket) -> None:
        """Replays come for one rank at a time: a publisher has a port for each."""
        while True:
            frames = await socket.recv_multipart()
            with self._guarded():
                found, now = codec.replayed(frames), self._clock()
                if found is None:
                    for rank, source in self.sources.items():
                        await self._do(rank, source.replay_ended(now))
                    continue
                batch = self._decoded(found[1])
                await self._do(batch.rank, self._source(batch.rank).replayed(found[0], batch, now))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            for rank, source in self.sources.items():
                await self._do(rank, source.tick(self._clock()))
            if self.alarm and not self._alarmed:
                self._alarmed = True
                log.warning("KV events of %s: %s", self.name, self.alarm)

    def _source(self, rank: int) -> Source:
        if rank not in self.sources:
            self.sources[rank] = Source(replays=bool(self._replay))
        return self.sources[rank]

    def _decoded(self, payload: bytes) -> codec.Batch:
        batch = codec.decode(payload)
        for kind, count in batch.unknown.items():
            self.unknown[kind] = self.unknown.get(kind, 0) + count
        return batch

    async def _do(self, rank: int, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Apply(batch):
                    self.translator.apply(batch)
                case Forget():
                    self.translator.forget()
                case Replay(start) if self._asker is not None:
                    await self._asker.send_multipart([b"", start.to_bytes(8, "big")])

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """What is no event is counted, and said once."""
        try:
            yield
        except ProtocolError as e:
            self.bad += 1
            if self.bad == 1:
                log.warning("KV events of %s: %s", self.name, e)
