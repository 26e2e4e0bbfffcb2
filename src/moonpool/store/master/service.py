"""The master's RPC shell."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from typing import Any

import msgspec

from moonpool.clock import Clock, SystemClock
from moonpool.errors import NotFound, ProtocolError
from moonpool.store.master.rules import RuleBook
from moonpool.store.master.state import MasterState
from moonpool.store.messenger.tenants import scoped
from moonpool.types import MessengerInfo, PoolStats, Rules
from moonpool.wire import messages as m
from moonpool.wire.auth import Peer
from moonpool.wire.rpc import Service


class MasterService(Service):
    requests = m.MasterRequest

    def __init__(
        self,
        c2c_config: bytes = b"",
        *,
        clock: Clock | None = None,
        expiry_s: float = 10.0,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        self.generation = secrets.token_hex(8)
        self._c2c = c2c_config
        self._rules = RuleBook()
        self._state = MasterState(clock or SystemClock(), expiry_s=expiry_s)
        for tenant, limit in (quotas or {}).items():
            self._state.set_quota(tenant, limit)
        self._lock = threading.Lock()
        self._sessions = 0
        self._tenants: dict[int, str] = {}
        self._peers: dict[int, Peer] = {}
        self._beating: dict[str, tuple[int, str]] = {}
        """By messenger: the session that its heartbeats come over (until the first, that of its registration), and its
        generation."""

    def open_session(self) -> int:
        with self._lock:
            self._sessions += 1
            return self._sessions

    def identify(self, session: int, peer: Peer) -> None:
        self._peers[session] = peer

    def close_session(self, session: int) -> None:
        """When the connection of its heartbeats breaks, a messenger is gone. If it lives, it comes back and tells all anew."""
        self._tenants.pop(session, None)
        self._peers.pop(session, None)
        with self._lock:
            ended = [(name, generation) for name, (over, generation) in self._beating.items() if over == session]
            for name, generation in ended:
                del self._beating[name]
                self._state.forget(name, generation)

    def tick(self) -> None:
        with self._lock:
            self._state.tick()

    def handle(self, session: int, request: Any) -> m.Message:
        if isinstance(request, m.Heartbeat) and not self._state.seen(request.info.name):  # before any lock
            raise NotFound("no such messenger", key=request.info.name, fix="Register first.")
        if isinstance(request, m.ADMIN):
            self._peers[session].require_admin(type(request).__name__)
        with self._lock:
            return self._answer(session, request)

    def _answer(self, session: int, request: Any) -> m.Message:
        state = self._state
        match request:
            case m.Hello(tenant):
                self._tenants[session] = tenant
                return m.Registered(self.generation)
            case m.Register(info, generation):
                state.register(info, generation)
                self._beating[info.name] = (session, generation)
                return m.Registered(self.generation, state.quotas_for(info.name), state.members)
            case m.Heartbeat(info, generation, tenants):
                state.report(info, tenants)
                self._beating[info.name] = (session, generation)
                return m.Registered(self.generation, state.quotas_for(info.name), state.members)
            case m.Publish(name, added, removed):
                state.publish(name, added, removed)
                return m.Registered(self.generation, members=state.members)
            case m.ListMessengers():
                return m.Messengers(state.messengers())
            case m.Locate(keys):
                return m.Located(state.locate(scoped(self._tenants.get(session, ""), keys)))
            case _:
                return self._answer_rest(request)

    def _answer_rest(self, request: Any) -> m.Message:
        match request:
            case m.SetQuota(tenant, limit):
                self._state.set_quota(tenant, limit)
                return m.Done()
            case m.GetQuotas():
                return m.Quotas(self._state.quotas())
            case m.GetStats():
                return m.Stats(PoolStats(objects=self._state.keys))
            case m.GetC2C():
                return m.C2C(self._config())
            case _:
                return self._answer_rules(request)

    def _answer_rules(self, request: Any) -> m.Message:
        match request:
            case m.ReportRules(sender, rules):
                if sender:
                    self._rules.report(sender, rules)
                return m.RulesAre(self._known_rules())
            case m.DisableRule(digest, reason):
                self._rules.disable(digest, reason)
                return m.Done()
            case m.EnableRule(digest):
                self._rules.enable(digest)
                return m.Done()
            case _:
                raise ProtocolError("not a master's request", have=type(request).__name__)

    def _config(self) -> bytes:
        """The C2C config as it was given, with what is disabled by now."""
        if not self._c2c or not self._rules.disabled:
            return self._c2c
        return msgspec.json.encode({**msgspec.json.decode(self._c2c), "disabled": self._rules.disabled})

    def _known_rules(self) -> Rules:
        return Rules(generation=self.generation, rules=self._rules.rules(), disabled=dict(self._rules.disabled))

    # -- for the owner and tests

    def messengers(self) -> list[MessengerInfo]:
        with self._lock:
            return self._state.messengers()

    def keys(self) -> int:
        with self._lock:
            return self._state.keys

    def rules(self) -> Rules:
        with self._lock:
            return self._known_rules()

    def quotas(self) -> dict[str, tuple[int, int]]:
        """Limit (-1: none) and bytes held, by tenant."""
        with self._lock:
            return self._state.quotas()
