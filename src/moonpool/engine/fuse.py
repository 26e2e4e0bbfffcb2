"""Fuse mode: the target prefills, and then its cache is improved with the source's pages of the same tokens.

    load      open_read(source pages) ─► the layers that the fuser reads        loader thread
    prefill   the target's own, up to the last prompt token; its pages are stored: they are native
    fuse      a new cache, fused where the source has full pages                model thread
    then      the last prompt token and the answer, over the fused cache; nothing of this is ever stored

Tokens behind the last full page stay native, like the last prompt token and the answer. A source that lacks one page of the
prompt, or whose numbers give NaN or Inf, leaves the request as it is: unfused, and counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from moonpool.c2c.bundle import open_bundle
from moonpool.c2c.config import C2CConfig, Rule
from moonpool.c2c.download import resolve_bundle
from moonpool.c2c.pages import unpack
from moonpool.c2c.projectors.fuse import Fuser
from moonpool.engine.cache import SequenceKV
from moonpool.errors import MoonpoolError, PoolError, WireError
from moonpool.keys import PageKey
from moonpool.store.base import KVPool

log = logging.getLogger(__name__)

_PAGES_PER_READ = 128
_TOKENS_AT_ONCE = 1024
"""Bounds the intermediates; more tokens make no product faster."""

LoadFuser: TypeAlias = Callable[[Rule], Fuser]
"""Makes a rule's fuser. Raises MoonpoolError where the rule must not be served."""


def load_fuser(rule: Rule, config: C2CConfig) -> Fuser:
    """Fetch the rule's bundle if it must be, verify it and check it against the rule's models.

    Raises DownloadFailed, BundleError, ConversionRefused (also for a bundle that is no fuser).
    """
    folder = resolve_bundle(rule.bundle, rule.digest, allowed_hosts=config.allowed_hosts)
    bundle = open_bundle(folder, expect_digest=rule.digest)
    bundle.check(rule.source.spec, rule.target.spec, config.page_size)
    return bundle.fuser()


@dataclass(frozen=True, slots=True)
class SourceKV:
    """The source's KV of tokens `[0, tokens)`: by source layer, K and V, each bf16 `[tokens, width]`."""

    tokens: int
    layers: dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Unfused:
    """A request that goes on with the target's own cache, and why."""

    reason: str


class Fusion:
    """The one `fuse` rule of a target. `fetch` is for the loader's thread, `apply` for the model's; `close` ends the thread
    that loads the bundle."""

    def __init__(self, pool: KVPool, rule: Rule, load: LoadFuser, *, page_size: int, device: torch.device) -> None:
        self._pool, self._rule, self._load_fuser, self._device = pool, rule, load, device
        self._shape = rule.source.spec.page_shape(page_size)
        self._fuser: Fuser | None = None
        self._settled = threading.Event()
        self._refusal = ""
        self._thread = threading.Thread(target=self._load, name="moonpool-fuse", daemon=True)

    def start(self) -> Fusion:
        """Load the bundle in the background; until it is there, requests go unfused."""
        self._thread.start()
        return self

    def wait_ready(self, timeout: float) -> bool:
        """Wait until the bundle is loaded or refused."""
        return self._settled.wait(timeout)

    def refusals(self) -> dict[str, str]:
        """The rule's name and why it is not served; empty if it is, or is being loaded."""
        return {self._rule.name: self._refusal} if self._refusal else {}

    def close(self, timeout: float) -> None:
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _load(self) -> None:
        try:
            self._fuser = self._load_fuser(self._rule).to(self._device)
        except MoonpoolError as e:
            self._refusal = str(e)
            log.warning("rule %s is not served: %s", self._rule.name, e)
        except Exception as e:  # process edge: an unforeseen fault refuses this rule and leaves the engine serving
            self._refusal = f"internal error: {e!r}"
            log.exception("rule %s could not be loaded", self._rule.name)
        self._settled.set()

    # -- the loader's thread

    def fetch(self, keys: Sequence[PageKey], prompt: int, wish: bool | None) -> SourceKV | Unfused | None:
        """The source's KV of a prompt of `prompt` tokens with these full pages; None where no fusing is wanted."""
        if wish is False or (wish is None and self._rule.serve != "always"):
            return None
        if self._fuser is None:
            return Unfused("refused" if self._refusal else "loading")
        tokens = min(len(keys) * self._shape.tokens, prompt - 1)
        if tokens < 1 or keys[0].owner != self._rule.target.owner:
            return Unfused("no_full_page")
        try:
            return self._read(self._fuser.source_layers(), keys, tokens)
        except (PoolError, WireError):
            return Unfused("pool_error")

    def _read(self, layers: Sequence[int], keys: Sequence[PageKey], tokens: int) -> SourceKV | Unfused:
        source = [k.of(self._rule.source.owner) for k in keys]
        if not all(self._pool.lookup(source)):
            return Unfused("source_missing")
        size, width = self._shape.tokens, self._shape.width
        shape = (2, len(layers), len(keys) * size, width)
        room = torch.empty(shape, dtype=torch.bfloat16)
        for at in range(0, len(source), _PAGES_PER_READ):
            with self._pool.open_read([k.text for k in source[at : at + _PAGES_PER_READ]]) as lease:
                for i, view in enumerate(lease.views, at):
                    if view is None or len(view) != self._shape.nbytes:
                        return Unfused("source_missing")
                    self._copy(room[:, :, i * size : (i + 1) * size], view, layers)
        return SourceKV(tokens, {s: (room[0, i, :tokens], room[1, i, :tokens]) for i, s in enumerate(layers)})

    def _copy(self, room: Tensor, view: memoryview, layers: Sequence[int]) -> None:
        """A function of its own, so that no tensor over the page's memory outlives the lease."""
        for half, kv in enumerate(unpack(view, self._shape)):
            room[half].copy_(kv[:, list(layers)].transpose(0, 1).flatten(2))

    # -- the model's thread

    @torch.inference_mode()
    def apply(self, kv: SequenceKV, source: SourceKV) -> SequenceKV | Unfused:
        """The fused cache, in memory of its own: `kv`, whose pages may be on their way into the pool, is left as it is."""
        assert self._fuser is not None
        fused = kv.copy()
        for step in self._fuser.steps():
            own = (kv.keys, kv.values)[step.half][step.layer]
            out = (fused.keys, fused.values)[step.half][step.layer]
            theirs = source.layers[step.source][step.half]
            for at in range(0, source.tokens, _TOKENS_AT_ONCE):
                rows = slice(at, min(at + _TOKENS_AT_ONCE, source.tokens))
                target = own[:, rows].transpose(0, 1)
                made = self._fuser.fuse(step, theirs[rows].to(self._device).float(), target.flatten(1).float())
                if not bool(torch.isfinite(made).all()):
                    return Unfused("not_finite")
                # Rounded like all that enters a cache.
                out[:, rows] = made.bfloat16().unflatten(1, target.shape[1:]).transpose(0, 1).to(out.dtype)
        return fused
