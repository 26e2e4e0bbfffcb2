"""A client's connections: to one messenger with its memory, to the master, and how they come back after a restart."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from moonpool.clock import Clock
from moonpool.errors import AccessDenied, ConnectionLost, DeadlineExceeded
from moonpool.store.memory import MappedMemory, Memory, RemoteMemory
from moonpool.transfer.segment import Segment
from moonpool.wire import address as addresses
from moonpool.wire import messages as m
from moonpool.wire.address import UnixAddress
from moonpool.wire.auth import Security
from moonpool.wire.dial import connect
from moonpool.wire.rpc import Channel, R, SocketChannel

_BACKOFF_S = (0.05, 8.0)
_FROZEN_S = 1.0
"""Shortest pause after a time-out."""


class _Holds:
    """How many leases and reservations a link carries. While there are some it must not end, for with the session the messenger gives
    up what they protect, and somebody here reads it or writes to it."""

    __slots__ = ("_closing", "_count", "_lock")

    def __init__(self) -> None:
        self._lock, self._count, self._closing = threading.Lock(), 0, False

    def take(self, count: int) -> bool:
        with self._lock:
            self._count += 0 if self._closing else count
            return not self._closing

    def give(self, count: int) -> bool:
        """Whether those were the last ones of a link that is to end."""
        with self._lock:
            self._count -= count
            return self._closing and not self._count

    def end(self) -> bool:
        """No more of them; whether there are none."""
        with self._lock:
            self._closing = True
            return not self._count


@dataclass(frozen=True, slots=True, eq=False)
class MessengerLink:
    """One session with one messenger, and its memory. It outlives what goes wrong with its channel while leases or
    reservations are held over it."""

    channel: Channel
    memory: Memory
    generation: str
    name: str
    keeper: socket.socket | None = None
    """Keeps the session open when a call that took too long has closed the channel."""
    _holds: _Holds = field(default_factory=_Holds)

    @staticmethod
    def mapped(channel: Channel, tenant: str = "") -> MessengerLink:
        """Over a channel that carries descriptors, which it takes over: bytes go through shared memory."""
        keeper = None
        try:
            welcome = channel.call(m.Hello(tenant), m.Welcome)
            keeper = channel.keeper()
            memory = MappedMemory(Segment(channel.take_descriptor()))
        except BaseException:
            if keeper:
                keeper.close()
            channel.close()
            raise
        return MessengerLink(channel, memory, welcome.generation, welcome.name, keeper)

    @staticmethod
    def open(text: str, *, security: Security = Security(), tenant: str = "", timeout: float = 10.0) -> MessengerLink:
        """Connect to a messenger's socket, or its TCP address. Raises WireError, ConfigError."""
        address = addresses.parse(text)
        channel = SocketChannel(address, timeout, security=security)
        if isinstance(address, UnixAddress):
            return MessengerLink.mapped(channel, tenant)
        try:
            welcome = channel.call(m.Hello(tenant), m.Welcome)
        except BaseException:
            channel.close()
            raise

        def data() -> socket.socket:
            sock = connect(address, security, timeout, purpose="data")
            try:
                sock.sendall(welcome.token)
            except OSError as e:
                sock.close()
                raise ConnectionLost(f"gone already: {e}", key=str(address)) from e
            return sock

        memory = RemoteMemory(data, welcome.region, welcome.region_generation)
        return MessengerLink(channel, memory, welcome.generation, welcome.name)

    def hold(self, count: int = 1) -> bool:
        """Leases or reservations were made over it. False if it is ending, and they with it."""
        return self._holds.take(count)

    def let_go(self, count: int = 1) -> None:
        """They are closed, committed or revoked."""
        if count and self._holds.give(count):
            self._end()

    def close(self, *, at_once: bool = True) -> None:
        """End it; not `at_once`: as soon as nothing is held over it."""
        if self._holds.end() or at_once:
            self._end()

    def _end(self) -> None:
        self.channel.close()
        if self.keeper:
            self.keeper.close()
        self.memory.close()


class Closable(Protocol):
    @property
    def channel(self) -> Channel: ...

    def close(self, *, at_once: bool = True) -> None: ...


L = TypeVar("L", bound=Closable)


@dataclass(frozen=True, slots=True, eq=False)
class MasterLink:
    channel: Channel

    def close(self, *, at_once: bool = True) -> None:
        self.channel.close()


class Reconnecting(Generic[L]):
    """A link that is opened when needed and again after it broke, with back-off: while the other side is away or frozen, calls fail
    at once with ConnectionLost instead of waiting each for a time-out."""

    def __init__(self, connect: Callable[[], L], clock: Clock) -> None:
        self._connect, self._clock = connect, clock
        self._link: L | None = None
        self._not_before = float("-inf")
        self._backoff = _BACKOFF_S[0]
        self._lock = threading.Lock()

    def get(self) -> L:
        with self._lock:
            if self._link is not None:
                return self._link
            if self._clock.now() < self._not_before:
                raise ConnectionLost("the other side is away; trying again shortly")
            try:
                self._link = self._connect()
            except (ConnectionLost, AccessDenied):
                self._pause(self._backoff)
                raise
            except DeadlineExceeded:
                self._pause(max(self._backoff, _FROZEN_S))
                raise
            return self._link

    def connect(self) -> L:
        """One more link, the caller's own."""
        return self._connect()

    def _pause(self, seconds: float) -> None:
        self._not_before = self._clock.now() + seconds
        self._backoff = min(2 * seconds, _BACKOFF_S[1])

    def call(self, request: m.Message, reply: type[R]) -> tuple[L, R]:
        """The reply and the link that it came over. A broken link is dropped; the request is not repeated."""
        link = self.get()
        return link, self.call_on(link, request, reply)

    def call_on(self, link: L, request: m.Message, reply: type[R]) -> R:
        try:
            answer = link.channel.call(request, reply)
        except ConnectionLost:
            self._drop(link)
            raise
        except DeadlineExceeded:
            self._drop(link, pause_s=_FROZEN_S)
            raise
        self._backoff = _BACKOFF_S[0]
        return answer

    def post_on(self, link: L, request: m.Message) -> None:
        """Send over this link and do not wait for the answer."""
        try:
            link.channel.post(request)
        except ConnectionLost:
            self._drop(link)
            raise
        except DeadlineExceeded:
            self._drop(link, pause_s=_FROZEN_S)
            raise

    def _drop(self, link: L, pause_s: float = 0.0) -> None:
        with self._lock:
            if self._link is link:
                self._link = None
                link.close(at_once=False)
                if pause_s:
                    # It takes connections but does not answer: only a pause keeps the next call from waiting too.
                    self._pause(max(self._backoff, pause_s))

    def close(self, *, at_once: bool = True) -> None:
        with self._lock:
            if self._link is not None:
                self._link.close(at_once=at_once)
            self._link = None
