"""From a rule to what serves it: the bundle is fetched, verified, checked against the models and judged by the gate."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from moonpool.c2c.bundle import open_bundle
from moonpool.c2c.config import C2CConfig, Rule
from moonpool.c2c.convert import Conversion
from moonpool.c2c.download import Progress, resolve_bundle
from moonpool.c2c.gate import REMEDY, GateRefused, examine
from moonpool.types import RuleStatus


def load_conversion(
    rule: Rule, config: C2CConfig, cache_dir: Path | None = None, progress: Progress | None = None
) -> Conversion:
    """Fetch the rule's bundle if it must be, verify it, check it against the rule's models and let the gate judge it.

    Raises DownloadFailed, BundleError, ConversionRefused (GateRefused, unless the rule says `force`).
    """
    folder = resolve_bundle(
        rule.bundle, rule.digest, cache_dir=cache_dir, allowed_hosts=config.allowed_hosts, progress=progress
    )
    bundle = open_bundle(folder, expect_digest=rule.digest)
    bundle.check(rule.source.spec, rule.target.spec, config.page_size)
    projector, verdict = bundle.projector(), examine(bundle, rule.gate)
    if not verdict.passed and not rule.force:
        raise GateRefused(f"the bundle does not pass the gate: {verdict.text}", key=rule.name, fix=REMEDY)
    return Conversion(projector, rule.source.spec, rule.target.spec, config.page_size, verdict=verdict)


def status_of(rule: Rule, conversion: Conversion | None, refusal: str, *, by_gate: bool = False) -> RuleStatus:
    """What whoever loads a rule's bundle has to say of it; neither conversion nor refusal: it is being loaded."""
    status = RuleStatus(name=rule.name, digest=rule.digest, mode=rule.mode, state="loading")
    if refusal:
        return replace(status, state="refused", gate="refused" if by_gate else "", reason=refusal)
    if conversion is None:
        return status
    verdict = conversion.verdict
    if verdict is None:
        return replace(status, state="ready")
    gate = "passed" if verdict.passed else "forced"
    return replace(status, state="ready", gate=gate, reason=verdict.text, kl_mean=verdict.kl_mean)
