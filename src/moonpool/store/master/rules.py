"""What is known of the conversion rules: what converters and engines said of them, and which are disabled. Pure.

Allowed to be lost, like the index: who said something says it again, and who disabled a rule disables it again when it sees
another generation of the master.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from moonpool.errors import NoSpace, NotFound
from moonpool.types import RuleStatus

MAX_SENDERS = 1024
MAX_RULES = 4096
_SUMS = ("pages", "requests", "checks", "kl", "agreed")


class RuleBook:
    """Every method is one atomic step; the caller locks."""

    def __init__(self) -> None:
        self._said: dict[str, dict[str, RuleStatus]] = {}
        self._verdicts: dict[str, RuleStatus] = {}
        self.disabled: dict[str, str] = {}
        """Bundle digest → reason."""

    def report(self, sender: str, rules: Sequence[RuleStatus]) -> None:
        """In place of what this sender said before. The verdict on a bundle is that of whoever loaded it last."""
        self._said.pop(sender, None)
        if len(self._said) >= MAX_SENDERS:
            del self._said[next(iter(self._said))]  # who has been silent for longest
        self._said[sender] = {r.digest: r for r in rules}
        for rule in rules:
            if rule.state and (rule.digest in self._verdicts or len(self._verdicts) < MAX_RULES):
                self._verdicts[rule.digest] = rule

    def disable(self, digest: str, reason: str) -> None:
        """The first reason stays. Raises NoSpace past MAX_RULES."""
        if digest not in self.disabled and len(self.disabled) >= MAX_RULES:
            raise NoSpace("too many disabled rules", key=digest, need=f"<= {MAX_RULES}", have=str(len(self.disabled)))
        self.disabled.setdefault(digest, reason)

    def enable(self, digest: str) -> None:
        """Raises NotFound if it is not disabled."""
        if self.disabled.pop(digest, None) is None:
            raise NotFound("this rule is not disabled", key=digest, have=", ".join(sorted(self.disabled)) or "none")

    def rules(self) -> list[RuleStatus]:
        """One for each bundle, all senders added up."""
        found: dict[str, RuleStatus] = {}
        for said in self._said.values():
            for digest, rule in said.items():
                total = found.get(digest)
                sums = {f: getattr(total, f) + getattr(rule, f) for f in _SUMS} if total else {}
                found[digest] = replace(rule, **sums)
        return [self._judged(digest, rule) for digest, rule in sorted(found.items(), key=lambda item: item[1].name)]

    def _judged(self, digest: str, rule: RuleStatus) -> RuleStatus:
        verdict = self._verdicts.get(digest, rule)
        if digest in self.disabled:
            verdict = replace(verdict, state="disabled", reason=self.disabled[digest])
        return replace(verdict, **{f: getattr(rule, f) for f in _SUMS})
