"""The pool's conversion rules as people see and steer them: what the gate made of each, what shadow checks found."""

from __future__ import annotations

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from moonpool.errors import ConfigError, ConversionRefused
from moonpool.types import Rules, RuleStatus
from moonpool.wire import messages as m
from moonpool.wire.auth import Security
from moonpool.wire.rpc import SocketChannel

_CALL_S = 5.0
_UNGATED = (
    "fuse rules have no gate: the target's engine computes its cache and improves it; see requests_fused in its metrics"
)
_COLORS = {"ready": "green", "loading": "yellow", "refused": "red", "disabled": "red"}


class RuleOffice:
    """One connection to the master. Raises WireError if it does not answer."""

    def __init__(self, master: str, security: Security = Security()) -> None:
        self._channel = SocketChannel(master, _CALL_S, security=security)

    def look(self) -> Rules:
        """What all have said. Rules that nobody spoke of (yet; of `fuse` rules nobody ever does) are shown as the config names
        them."""
        known = self._channel.call(m.ReportRules(), m.RulesAre).rules
        spoken = {r.digest for r in known.rules}
        silent = [r for r in _configured(self._channel.call(m.GetC2C(), m.C2C).config) if r.digest not in spoken]
        return msgspec.structs.replace(known, rules=[*known.rules, *silent])

    def disable(self, rule: str, reason: str) -> RuleStatus:
        """Raises ConfigError for a rule that there is not, ConversionRefused for a `fuse` rule."""
        found = self._find(rule)
        if found.mode == "fuse":
            raise ConversionRefused("a fuse rule cannot be disabled", key=found.name, fix="take it out of the C2C file")
        self._channel.call(m.DisableRule(found.digest, reason), m.Done)
        return found

    def enable(self, rule: str) -> RuleStatus:
        """Raises ConfigError for a rule that there is not, NotFound if it is not disabled, AccessDenied for who is no admin."""
        found = self._find(rule)
        self._channel.call(m.EnableRule(found.digest), m.Done)
        return found

    def _find(self, rule: str) -> RuleStatus:
        """By its name (`large→small`, also written `large:small`) or the beginning of its bundle's digest."""
        rules = self.look().rules
        named = [
            r for r in rules if rule.replace(":", "→", 1) == r.name or (len(rule) > 5 and r.digest.startswith(rule))
        ]
        if len(named) != 1:
            have = ", ".join(f"{r.name} ({r.digest[:12]})" for r in rules) or "none"
            raise ConfigError("no such rule" if not named else "several such rules", key=rule, have=have)
        return named[0]

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> RuleOffice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Side(msgspec.Struct):
    name: str


class _Rule(msgspec.Struct):
    source: _Side
    target: _Side
    digest: str
    mode: str


class _Config(msgspec.Struct):
    """What is needed of a C2C config here; the whole of it would need torch to be read."""

    rules: list[_Rule] = []
    fusions: list[_Rule] = []


def _configured(raw: bytes) -> list[RuleStatus]:
    if not raw:
        return []
    config = msgspec.json.decode(raw, type=_Config)
    return [_silent(r) for r in config.rules] + [_silent(r, _UNGATED) for r in config.fusions]


def _silent(r: _Rule, reason: str = "") -> RuleStatus:
    return RuleStatus(name=f"{r.source.name}→{r.target.name}", digest=r.digest, mode=r.mode, reason=reason)


def rules_table(known: Rules) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="conversion rules", title_justify="left")
    for column in ("rule", "bundle", "mode", "state", "gate"):
        table.add_column(column, no_wrap=True)
    for column in ("pages", "answers", "checks", "mean KL", "same"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for r in known.rules:
        state = r.state or ("engine's own" if r.mode == "fuse" else "nobody converts")
        shadow = (f"{r.kl / r.checks:.3f}", f"{100 * r.agreed / r.checks:.0f} %") if r.checks else ("–", "–")
        table.add_row(
            r.name,
            r.digest[:12],
            r.mode,
            Text(state, style=_COLORS.get(state, "")),
            Text(r.gate or "–", style="yellow" if r.gate == "forced" else ""),
            f"{r.pages:,}",
            f"{r.requests:,}",
            f"{r.checks:,}",
            *shadow,
            Text(r.reason),
        )
    return table
