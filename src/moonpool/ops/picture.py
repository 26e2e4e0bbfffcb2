"""A look at a whole pool: its master's list, and each messenger's own figures. Read only; maps none of the pool's memory."""

from __future__ import annotations

import time
from typing import Self

import msgspec

from moonpool.errors import ConnectionLost, MoonpoolError
from moonpool.store.peers import addresses_of, host_id
from moonpool.types import MessengerInfo, PoolStats
from moonpool.wire import messages as m
from moonpool.wire.auth import Security
from moonpool.wire.rpc import R, SocketChannel

_CALL_S = 2.0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One messenger."""

    info: MessengerInfo
    generation: str = ""
    """Changes when it is started anew: its counters begin at 0 again."""
    stats: PoolStats | None = None
    """None: it does not answer."""
    error: str = ""


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    limit: int | None
    used: int


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """The pool at one moment. `at`: seconds of a clock that only differences of mean anything."""

    at: float
    master: str
    keys: int
    """In the master's index; a key with several copies counts once."""
    messengers: list[Row]
    quotas: list[Quota]

    @property
    def total(self) -> PoolStats:
        total = PoolStats()
        for row in self.messengers:
            total = total + row.stats if row.stats else total
        return total


class Observer:
    """Keeps its connections from look to look; opens them anew after a failure."""

    def __init__(self, master: str, security: Security = Security()) -> None:
        self._master, self._security = master, security
        self._channels: dict[str, SocketChannel] = {}
        self._generations: dict[str, str] = {}
        self._here = host_id()

    def look(self) -> Picture:
        """Raises WireError if the master does not answer; a messenger that does not is a row without figures."""
        infos = self._call(self._master, m.ListMessengers(), m.Messengers).messengers
        keys = self._call(self._master, m.GetStats(), m.Stats).stats.objects
        quotas = self._call(self._master, m.GetQuotas(), m.Quotas).tenants
        return Picture(
            at=time.monotonic(),
            master=self._master,
            keys=keys,
            messengers=[self._row(info) for info in infos],
            quotas=[Quota(tenant=t, limit=None if q < 0 else q, used=u) for t, (q, u) in sorted(quotas.items())],
        )

    def _row(self, info: MessengerInfo) -> Row:
        failed: MoonpoolError = ConnectionLost("no address reaches it from this machine")
        for address in addresses_of(info, self._here):
            try:
                if address not in self._channels:
                    welcome = self._call(address, m.Hello(), m.Welcome)
                    self._generations[address] = welcome.generation
                    if welcome.name != info.name:
                        raise ConnectionLost("another messenger is at that address", have=welcome.name)
                stats = self._call(address, m.GetStats(), m.Stats).stats
                return Row(info=info, generation=self._generations[address], stats=stats)
            except MoonpoolError as e:
                self._drop(address)
                failed = e
        return Row(info=info, error=f"{type(failed).__name__}: {failed}")

    def _call(self, address: str, request: m.Message, reply: type[R]) -> R:
        try:
            if address not in self._channels:
                self._channels[address] = SocketChannel(address, _CALL_S, security=self._security)
            return self._channels[address].call(request, reply)
        except MoonpoolError:
            self._drop(address)
            raise

    def _drop(self, address: str) -> None:
        channel = self._channels.pop(address, None)
        if channel:
            channel.close()

    def close(self) -> None:
        for address in list(self._channels):
            self._drop(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
