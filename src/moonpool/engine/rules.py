"""Which converted pages this engine may take now, and what became of the requests that took some.

A rule's pages are taken only while the rule is known to be served: whoever loads its bundle (the pool's converter; this engine in
mode `on_load`) says what the gate made of it, and the pool's master tells everybody, also of rules that are disabled. Nothing is
taken of a rule that nobody spoke of: what lies in the pool may be from a time when it was served.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from moonpool.c2c.config import Rule
from moonpool.c2c.shadow import DriftAlarm
from moonpool.c2c.standing import RuleDesk
from moonpool.clock import Clock
from moonpool.store.base import KVPool
from moonpool.types import RuleStatus


class EngineRules:
    """The conversion rules of one target. Safe from several threads."""

    def __init__(
        self, pool: KVPool, rules: Sequence[Rule], clock: Clock, own: Callable[[Rule], RuleStatus | None]
    ) -> None:
        """`own`: what this engine itself has to say of a rule whose bundle it loads."""
        self._rules = {r.digest: r for r in rules}
        self._desk = RuleDesk(pool, f"engine {rules[0].target.name}" if rules else "engine", clock)
        self._own = own
        self._lock = threading.Lock()
        self._requests: dict[str, int] = {}
        self._alarms: dict[str, DriftAlarm] = {}

    def __getitem__(self, digest: str) -> Rule | None:
        return self._rules.get(digest)

    # -- the loader's thread

    def allowed(self, digests: Sequence[str]) -> tuple[str, ...]:
        """Those of these bundles whose pages may be taken. It asks the master if what is known is old or has a gap."""
        ours = [d for d in digests if d in self._rules]
        if ours and (self._desk.due() or any(self._standing(d) is None for d in ours)):
            self._desk.tell(self.statuses())
            self._restart_enabled()
        off = self._desk.disabled
        return tuple(d for d in digests if d not in off and (d not in self._rules or self._served(d)))

    def _served(self, digest: str) -> bool:
        found = self._standing(digest)
        return found is not None and found.state == "ready"

    def _standing(self, digest: str) -> RuleStatus | None:
        found = self._own(self._rules[digest]) or self._desk.status(digest)
        return found if found is not None and found.state else None

    def _restart_enabled(self) -> None:
        off = self._desk.disabled
        with self._lock:
            for digest, alarm in self._alarms.items():
                if alarm.raised and digest not in off:
                    alarm.restart()

    # -- the model's thread

    def answered(self, bundles: Sequence[str]) -> None:
        """A request was answered over pages of these bundles."""
        with self._lock:
            for digest in bundles:
                self._requests[digest] = self._requests.get(digest, 0) + 1

    def checked(self, digest: str, kl: float, same: bool) -> None:
        """A shadow check of one of these requests. If the drift alarm goes off, the rule is disabled."""
        standing = self._standing(digest)
        with self._lock:
            if digest not in self._alarms:
                self._alarms[digest] = DriftAlarm(standing.kl_mean if standing else 0.0)
            alarm = self._alarms[digest]
            raised = alarm.add(kl, same)
        if raised:
            self._desk.disable(digest, alarm.raised, self.statuses())
        else:
            self._desk.tell(self.statuses())

    # -- any thread

    def forced(self, digests: Sequence[str]) -> tuple[str, ...]:
        """Those that are served although the gate refused them."""
        return tuple(d for d in digests if d in self._rules and (s := self._standing(d)) and s.gate == "forced")

    def disabled(self) -> Mapping[str, str]:
        """Of this target's rules: bundle digest → reason."""
        return {d: why for d, why in self._desk.disabled.items() if d in self._rules}

    def statuses(self) -> list[RuleStatus]:
        """What this engine has to say of each rule."""
        with self._lock:
            return [self._status(r) for r in self._rules.values()]

    def _status(self, rule: Rule) -> RuleStatus:
        told = self._own(rule) or RuleStatus(name=rule.name, digest=rule.digest, mode=rule.mode)
        told = replace(told, requests=self._requests.get(rule.digest, 0))
        alarm = self._alarms.get(rule.digest)
        return replace(told, checks=alarm.checks, kl=alarm.kl, agreed=alarm.agreed) if alarm else told
