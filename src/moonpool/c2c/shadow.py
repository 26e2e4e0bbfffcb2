"""Shadow checks: whether converted pages are still as good as the report says. Pure: no model, no clock, no pool.

A sampled share of the requests that were answered over converted pages is computed natively afterwards, and the two
distributions of the first token are compared. Their KL feeds a one-sided CUSUM:

    S ← max(0, S + min(KL / expected, CAP) − ALLOWED)        alarm when S > LIMIT, after at least MIN_CHECKS

`expected` is the report's mean. A mean of up to ALLOWED times that is borne for ever, since requests are not the report's texts.
KL is heavy-tailed (a few tokens carry most of it), hence the cap: no single request can raise the alarm. Simulated with a
log-normal whose 95th percentile is 3.6 to 4 times its mean, as in our reports: no false alarm of a sound rule in 300,000 checks;
a mean that is tenfold is found after 12 to 19 checks, a fivefold one after 33 to 58.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

ALLOWED = 2.5
CAP = 10.0
LIMIT = 30.0
MIN_CHECKS = 8
LEAST_EXPECTED = 0.01
"""Nats: below that, a quotient of two KLs is noise of rounding."""
WITHOUT_REPORT = 0.25
"""What is expected of a rule that is served by force and has no report: the gate's own bound."""


@dataclass(slots=True)
class DriftAlarm:
    """One rule's. `expected`: mean KL of its report, in nats; 0 if there is none."""

    expected: float
    checks: int = 0
    kl: float = 0.0
    """Sum over all checks."""
    agreed: int = 0
    score: float = 0.0
    raised: str = ""
    """Why the rule must stop; empty: it need not."""

    def __post_init__(self) -> None:
        self.expected = max(self.expected, LEAST_EXPECTED) if self.expected else WITHOUT_REPORT

    def add(self, kl: float, same: bool) -> bool:
        """One check; True if it raises the alarm. A KL that is no number counts as the cap."""
        ratio = kl / self.expected
        capped = ratio if ratio <= CAP else CAP  # NaN compares false
        self.checks += 1
        self.kl += capped * self.expected if kl != kl else kl
        self.agreed += same
        self.score = max(0.0, self.score + capped - ALLOWED)
        if self.raised or self.checks < MIN_CHECKS or self.score <= LIMIT:
            return False
        self.raised = (
            f"drift: mean KL {self.kl / self.checks:.3g} over {self.checks} shadow checks, {self.expected:.3g} expected; "
            f"first token agrees in {self.agreed}"
        )
        return True

    def restart(self) -> None:
        """Somebody enabled the rule again: it gets a fresh trial, its sums go on."""
        self.score, self.raised = 0.0, ""


def sampled(share: float, random: Random) -> bool:
    """Whether this request is one of the share that is checked."""
    return share > 0 and random.random() < share
