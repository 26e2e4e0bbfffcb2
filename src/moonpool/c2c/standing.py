"""How one process keeps up with the rules of the whole cluster: it tells what it knows, and hears what all know."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Sequence

from msgspec.structs import replace

from moonpool.clock import Clock
from moonpool.errors import PoolError, WireError
from moonpool.store.base import KVPool
from moonpool.types import Rules, RuleStatus

log = logging.getLogger(__name__)

REFRESH_S = 2.0
"""How old what is known may be: so long after a rule was disabled somewhere, others may still take its pages."""


class RuleDesk:
    """The exchange with the pool's master. Safe from several threads; a master that is away leaves what was heard last."""

    def __init__(self, pool: KVPool, role: str, clock: Clock) -> None:
        self._pool, self._clock = pool, clock
        self.sender = f"{role} {socket.gethostname()[:64]}:{os.getpid()}.{secrets.token_hex(2)}"
        self._lock = threading.Lock()
        self._exchange = threading.Lock()
        self._known = Rules()
        self._ours: dict[str, str] = {}
        self._asked = float("-inf")

    @property
    def disabled(self) -> dict[str, str]:
        """Bundle digest → reason: what the master said, and what this process disabled itself."""
        with self._lock:
            return {**self._known.disabled, **self._ours}

    def status(self, digest: str) -> RuleStatus | None:
        """What is known of this bundle in the whole cluster."""
        with self._lock:
            return next((r for r in self._known.rules if r.digest == digest), None)

    def seen(self, status: RuleStatus) -> RuleStatus:
        """A status of ours in the light of what is disabled."""
        reason = self.disabled.get(status.digest)
        return status if reason is None else replace(status, state="disabled", reason=reason)

    def due(self) -> bool:
        return self._clock.now() - self._asked >= REFRESH_S

    def tell(self, rules: Sequence[RuleStatus]) -> None:
        """Exchange now. Never raises for a pool that is away."""
        self._asked = self._clock.now()
        with self._exchange:
            try:
                known = self._pool.report_rules(self.sender, rules)
                untold = self._untold(known)
                for digest, reason in untold.items():
                    self._pool.disable_rule(digest, reason)
            except (PoolError, WireError) as e:
                log.debug("the rules' standing could not be asked: %s", e)
                return
            with self._lock:
                self._known = replace(known, disabled={**known.disabled, **untold})
                if known.generation:  # from here on it is the master's to keep, so that it can be enabled there
                    self._ours = {d: why for d, why in self._ours.items() if d not in untold}

    def _untold(self, known: Rules) -> dict[str, str]:
        """What the master must hear: what it was not told yet, and after its restart, which made it forget, all that we know of."""
        with self._lock:
            forgotten = self._known.disabled if known.generation != self._known.generation else {}
            return {**{d: why for d, why in forgotten.items() if d not in known.disabled}, **self._ours}

    def disable(self, digest: str, reason: str, rules: Sequence[RuleStatus] = ()) -> None:
        """Here at once, and in the cluster as soon as the master hears it."""
        log.warning("the rule of bundle %s is disabled: %s", digest[:12], reason)
        with self._lock:
            self._ours[digest] = reason
        self.tell(rules)
