"""An engine's KV event publisher, as vLLM and SGLang have it: PUB for live batches, ROUTER for those of the past."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq


class KVPublisher:
    """`publish` numbers a batch and sends it; `lose` numbers and keeps it, so that only a replay gives it."""

    def __init__(self, *, topic_in_replay: bool = True, keep: int = 10_000) -> None:
        self._context = zmq.Context()
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self.events = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._topic, self._keep = topic_in_replay, keep
        self._batches: list[tuple[int, bytes]] = []
        self._next = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.asked: list[int] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def publish(self, events: list[Any]) -> int:
        number, payload = self._number(events)
        self._pub.send_multipart([b"", number.to_bytes(8, "big"), payload])
        return number

    def lose(self, events: list[Any]) -> int:
        return self._number(events)[0]

    def restart(self) -> None:
        with self._lock:
            self._batches, self._next = [], 0

    def _number(self, events: list[Any]) -> tuple[int, bytes]:
        with self._lock:
            number, payload = self._next, msgspec.msgpack.encode([0.0, events, 0])
            self._next += 1
            self._batches = (
                [*self._batches[1 - self._keep :], (number, payload)] if self._keep > 1 else [(number, payload)]
            )
        return number, payload

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if not self._router.poll(50):
                continue
            who, empty, start = self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            topic = [b""] if self._topic else []
            with self._lock:
                kept = [b for b in self._batches if b[0] >= first]
            for number, payload in kept:
                self._router.send_multipart([who, empty, *topic, number.to_bytes(8, "big"), payload])
            self._router.send_multipart([who, empty, *topic, b"\xff" * 8, b""])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join(5)
        self._context.destroy(linger=0)
