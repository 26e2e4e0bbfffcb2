"""How long things take on one kind of instance: polynomials, fitted from what was measured, and corrected while it runs.

prefill  c0 + c1 · (n − p) + c2 · (n² − p²)      n tokens of which p are cached (Mooncake, FAST'25, Table 1: both terms of attention)
transfer latency + bytes / bandwidth
decode   t0 + t1 · batch + t2 · tokens in the batch's contexts      one step
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from moonpool.errors import ConfigError


class PrefillSample(NamedTuple):
    tokens: int
    cached: int
    seconds: float


class DecodeSample(NamedTuple):
    batch: int
    context: int
    """Tokens, over the batch."""
    seconds: float


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What start values are reckoned from, where nothing was measured. Defaults: the paper's node, LLaMA3-70B on 8 × A800."""

    layers: int = 80
    hidden: int = 8192
    group: int = 8
    """Query heads for each KV head."""
    flops: float = 8 * 312e12
    utilisation: float = 0.6
    """Of `flops` in prefill. The paper's own bars give .60 to .66."""
    memory_bandwidth: float = 8 * 2.0e12 * 0.6
    weights_bytes: float = 140e9
    element_bytes: int = 2
    link: float = 40e9
    """Bytes/s between two instances."""

    @property
    def kv_bytes_per_token(self) -> float:
        return self.layers * 2 * self.hidden / self.group * self.element_bytes


class PerfModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients of the formulas above; seconds, tokens, bytes. As JSON it is what `moonpool conductor fit` writes."""

    prefill: tuple[float, float, float] = (0.0, 0.0, 0.0)
    decode: tuple[float, float, float] = (0.0, 0.0, 0.0)
    latency_s: float = 0.002
    bandwidth: float = 40e9
    kv_bytes_per_token: float = 327_680.0

    def prefill_s(self, tokens: int, cached: int) -> float:
        c0, c1, c2 = self.prefill
        return c0 + c1 * (tokens - cached) + c2 * (tokens * tokens - cached * cached)

    def transfer_s(self, tokens: int) -> float:
        """Without any queue."""
        return self.latency_s + tokens * self.kv_bytes_per_token / self.bandwidth

    def step_s(self, batch: int, context: int) -> float:
        t0, t1, t2 = self.decode
        return t0 + t1 * batch + t2 * context

    @classmethod
    def of(cls, machine: Machine) -> PerfModel:
        """Start values: FLOPs of prefill over the machine's rate; a decode step reads the weights once and every context once."""
        rate = machine.flops * machine.utilisation
        linear = machine.layers * 22 * machine.hidden**2 / rate
        square = machine.layers * 4 * machine.hidden / rate
        step = machine.weights_bytes / machine.memory_bandwidth
        context = machine.kv_bytes_per_token / machine.memory_bandwidth
        return cls(
            prefill=(0.0, linear, square),
            decode=(step, 1.5e-4, context),
            bandwidth=machine.link,
            kv_bytes_per_token=machine.kv_bytes_per_token,
        )

    def fitted(self, prefill: Sequence[PrefillSample] = (), decode: Sequence[DecodeSample] = ()) -> PerfModel:
        """The same with coefficients of these samples, none negative, errors weighed relatively. Raises ConfigError for fewer than
        three samples of a kind that there are any of."""
        made = self
        if prefill:
            rows = [[1, s.tokens - s.cached, s.tokens**2 - s.cached**2] for s in prefill]
            c0, c1, c2 = _non_negative(rows, [s.seconds for s in prefill])
            made = msgspec.structs.replace(made, prefill=(c0, c1, c2))
        if decode:
            t0, t1, t2 = _non_negative([[1, s.batch, s.context] for s in decode], [s.seconds for s in decode])
            made = msgspec.structs.replace(made, decode=(t0, t1, t2))
        return made


def _non_negative(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Least squares with no negative coefficient. Three unknowns: every subset is tried."""
    if len(rows) < 3:
        raise ConfigError("too few samples to fit", need="3", have=str(len(rows)))
    y = np.array(seconds, float)
    if not (y > 0).all():
        raise ConfigError("a sample took no time", need="> 0 s")
    x = np.array(rows, float) / y[:, None]
    best, found = np.inf, np.zeros(3)
    for size in (1, 2, 3):
        for columns in map(list, itertools.combinations(range(3), size)):
            scale = np.abs(x[:, columns]).max(0).clip(1e-300)
            solution = np.linalg.lstsq(x[:, columns] / scale, np.ones(len(y)), rcond=None)[0] / scale
            error = float(np.square(x[:, columns] @ solution - 1).sum())
            if (solution >= 0).all() and error < best - 1e-12:
                best, found = error, np.zeros(3)
                found[columns] = solution
    return float(found[0]), float(found[1]), float(found[2])


class Correction:
    """What an instance takes over what the model said: the median of its last prefills, within [1/4, 4].

    Only prefills with work in them count: on a cache hit the quotient of two small numbers says nothing, and engines report rates in
    the billions.
    """

    least_tokens = 1024
    """Uncached tokens that a sample must have had."""

    def __init__(self, window: int = 32) -> None:
        self._ratios = deque[float](maxlen=window)
        self.factor = 1.0

    def add(self, uncached: int, predicted: float, actual: float) -> None:
        if uncached >= self.least_tokens and predicted > 0 and actual > 0:
            self._ratios.append(actual / predicted)
            self.factor = min(4.0, max(0.25, median(self._ratios)))
