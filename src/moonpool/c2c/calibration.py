"""What this machine reaches for one pair of models, measured once and kept (`moonpool c2c calibrate`).

A file per pair under `<cache>/calibration`, named after both models' revisions, so that other weights never inherit it. The
engine and the converter read it when they start; where there is none, rules with `pays: auto` behave as with `always`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from moonpool import paths
from moonpool.c2c.cost import DEFAULT_VARIANT, Machine, PairCost, conversion_flops, pair_cost
from moonpool.c2c.signature import ModelSpec
from moonpool.errors import ConfigError
from moonpool.keys import digest

if TYPE_CHECKING:
    from moonpool.c2c.config import Rule

log = logging.getLogger(__name__)

FORMAT = 1
Tier = Literal["memory", "disk", "network"]


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates of one machine for one pair. FLOP/s, bytes/s, seconds."""

    format: int = FORMAT
    source: str
    target: str
    device: str
    threads: int
    prefill: float
    """FLOP/s of the target's own prefill."""
    gemm: float
    """FLOP/s of fp32 products of the default variant's shapes."""
    fetch: dict[Tier, float]
    """Bytes/s from each tier into the target's cache."""
    tier: Tier = "memory"
    """Where this machine's pages come from, as far as decisions go."""
    overhead_s: float
    """Per request that takes converted pages."""
    min_tokens: int = 64
    convert_s: dict[str, float] = {}
    """Bundle digest → seconds per token of its whole conversion, rotation and rounding included."""

    def machine(self) -> Machine:
        return Machine(
            prefill=self.prefill,
            convert=self.gemm,
            fetch=self.fetch[self.tier],
            overhead_s=self.overhead_s,
            min_tokens=self.min_tokens,
        )

    def cost(self, source: ModelSpec, target: ModelSpec, bundle: str = "") -> PairCost:
        """Of the bundle with this digest as measured; of one that was not, as if it were the default variant."""
        found = pair_cost(self.machine(), source, target, conversion_flops(DEFAULT_VARIANT, source, target) or 0)
        measured = self.convert_s.get(bundle)
        return found if measured is None else replace(found, convert_s=measured)


def calibration_path(source: ModelSpec, target: ModelSpec, cache_dir: Path | None = None) -> Path:
    revisions = [("source", source.revision), ("target", target.revision)]
    return (cache_dir or paths.cache_dir()) / "calibration" / f"{digest('moonpool.calibration', revisions)}.json"


def save_calibration(found: Calibration, source: ModelSpec, target: ModelSpec, cache_dir: Path | None = None) -> Path:
    """Write it, all or nothing. Raises ConfigError where the cache cannot be written."""
    path = calibration_path(source, target, cache_dir)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
        temporary.replace(path)
    except OSError as e:
        raise ConfigError("cannot write the calibration", key=str(path), have=e.strerror or str(e)) from e
    return path


def find_calibration(source: ModelSpec, target: ModelSpec, cache_dir: Path | None = None) -> Calibration | None:
    """This machine's calibration of the pair; None if there is none that can be used (then the reason is logged)."""
    path = calibration_path(source, target, cache_dir)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as e:
        log.warning("calibration %s is not used: %s", path, e)
        return None
    rates = [found.prefill, found.gemm, found.fetch.get(found.tier, 0.0)]
    if found.format != FORMAT or min(rates) <= 0:
        log.warning("calibration %s is not used: format %d, rates %s", path, found.format, rates)
        return None
    return found


def rule_cost(rule: Rule, cache_dir: Path | None = None, *, device: str = "") -> PairCost | None:
    """What the rule's pages cost a target on `device` (empty: on whichever was calibrated); None where the cost model has no
    say: `pays: always`, or no calibration."""
    if rule.pays == "always":
        return None
    source, target = rule.source.spec, rule.target.spec
    found = find_calibration(source, target, cache_dir)
    if found is None or (device and found.device != device) or not target.intermediate:
        return None
    return found.cost(source, target, rule.digest)


class RuleCosts:
    """The converter's side: whether a rule's page is worth making ahead. Immutable."""

    def __init__(self, costs: Mapping[int, PairCost], page_size: int) -> None:
        """`costs` by the rule's number; a rule that is missing is always worth it."""
        self._costs, self._page_size = dict(costs), page_size

    @staticmethod
    def of(rules: list[Rule], page_size: int, cache_dir: Path | None = None) -> RuleCosts:
        found = {i: cost for i, rule in enumerate(rules) if (cost := rule_cost(rule, cache_dir)) is not None}
        return RuleCosts(found, page_size)

    def refusal(self, rule: int, page: int) -> str:
        """Why the page of this index should not be converted; empty if it should."""
        cost = self._costs.get(rule)
        return "" if cost is None else cost.page_refusal(page * self._page_size, (page + 1) * self._page_size)
