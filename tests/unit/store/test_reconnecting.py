"""Links that come back: one attempt for many threads, back-off, pauses for who does not answer."""

from __future__ import annotations

import threading

import pytest

from moonpool.errors import ConnectionLost, DeadlineExceeded, MoonpoolError
from moonpool.store.links import MasterLink, Reconnecting
from moonpool.testing.fake_clock import FakeClock
from moonpool.wire import messages as m
from moonpool.wire.rpc import Channel, R


class FakeChannel(Channel):
    def __init__(self, peer: Peer) -> None:
        self.peer, self.closed = peer, False

    def call(self, request: m.Message, reply: type[R], *, timeout: float | None = None) -> R:
        self.peer.calls += 1
        if self.peer.call_error:
            raise self.peer.call_error
        return reply()

    def post(self, request: m.Message) -> None:
        self.call(request, m.Done)

    def take_descriptor(self) -> int:
        raise AssertionError

    def close(self) -> None:
        self.closed = True


class Peer:
    def __init__(self) -> None:
        self.connects = self.calls = 0
        self.connect_error: MoonpoolError | None = None
        self.call_error: MoonpoolError | None = None
        self.channels: list[FakeChannel] = []

    def connect(self) -> MasterLink:
        self.connects += 1
        if self.connect_error:
            raise self.connect_error
        self.channels.append(FakeChannel(self))
        return MasterLink(self.channels[-1])


def test_one_connection_serves_many_calls() -> None:
    peer, clock = Peer(), FakeClock()
    link = Reconnecting(peer.connect, clock)
    for _ in range(5):
        link.call(m.Done(), m.Done)
    assert (peer.connects, peer.calls) == (1, 5)
    link.close()
    assert peer.channels[0].closed


def test_a_broken_connection_is_made_anew_at_once() -> None:
    peer, clock = Peer(), FakeClock()
    link = Reconnecting(peer.connect, clock)
    link.call(m.Done(), m.Done)
    peer.call_error = ConnectionLost("gone")
    with pytest.raises(ConnectionLost):
        link.call(m.Done(), m.Done)
    assert peer.channels[0].closed
    peer.call_error = None
    link.call(m.Done(), m.Done)
    assert peer.connects == 2


def test_who_is_away_is_tried_less_and_less_often() -> None:
    peer, clock = Peer(), FakeClock()
    peer.connect_error = ConnectionLost("nobody")
    link = Reconnecting(peer.connect, clock)
    for _ in range(6000):
        with pytest.raises(ConnectionLost):
            link.call(m.Done(), m.Done)
        clock.advance(0.01)
    assert 8 <= peer.connects <= 20
    peer.connect_error = None
    clock.advance(10)
    link.call(m.Done(), m.Done)


def test_who_takes_connections_but_does_not_answer_is_left_alone_for_a_while() -> None:
    peer, clock = Peer(), FakeClock()
    peer.call_error = DeadlineExceeded("frozen")
    link = Reconnecting(peer.connect, clock)
    for _ in range(100):
        with pytest.raises((ConnectionLost, DeadlineExceeded)):
            link.call(m.Done(), m.Done)
    assert peer.calls == 1
    clock.advance(1.1)
    peer.call_error = None
    link.call(m.Done(), m.Done)
    peer.call_error = DeadlineExceeded("frozen again")
    with pytest.raises(DeadlineExceeded):
        link.call(m.Done(), m.Done)
    clock.advance(1.1)
    peer.call_error = None
    link.call(m.Done(), m.Done)


def test_a_late_failure_of_an_old_link_does_not_drop_the_new_one() -> None:
    peer, clock = Peer(), FakeClock()
    link = Reconnecting(peer.connect, clock)
    old, _ = link.call(m.Done(), m.Done)
    peer.call_error = ConnectionLost("gone")
    with pytest.raises(ConnectionLost):
        link.call_on(old, m.Done(), m.Done)
    peer.call_error = None
    new, _ = link.call(m.Done(), m.Done)
    peer.call_error = ConnectionLost("gone")
    with pytest.raises(ConnectionLost):
        link.call_on(old, m.Done(), m.Done)
    assert link.get() is new


def test_many_threads_make_one_reconnect() -> None:
    peer, clock = Peer(), FakeClock()
    link = Reconnecting(peer.connect, clock)
    threads = [threading.Thread(target=link.call, args=(m.Done(), m.Done)) for _ in range(32)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert peer.connects == 1
