"""A Transformers causal language model as the engine drives it: tokens and caches in, logits out."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from moonpool.c2c.signature import ModelSpec
from moonpool.engine.cache import ATTENTION, RaggedCache, SequenceKV, causal_mask
from moonpool.errors import ModelError

log = logging.getLogger(__name__)

Compute = Literal["auto", "float32", "bfloat16"]


def compute_dtype(wish: Compute, device: torch.device) -> tuple[torch.dtype, str]:
    """The type to compute in, and why.

    On a CPU without bf16 units torch emulates bf16 slower than fp32, so weights are widened when they are loaded.
    """
    if wish != "auto":
        return getattr(torch, wish), "as configured"
    if device.type != "cpu":
        return torch.bfloat16, f"{device.type} computes bf16"
    units = [u for u in ("amx_bf16", "avx512_bf16", "bf16") if _cpu_capabilities().get(u)]
    if units:
        return torch.bfloat16, f"this CPU has bf16 units ({', '.join(units)})"
    return torch.float32, "this CPU has no bf16 units"


def _cpu_capabilities() -> dict[str, Any]:
    ask = getattr(torch.cpu, "get_capabilities", None)  # newer than the oldest torch we allow
    return dict(ask()) if ask else {}


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar of Transformers: it writes over our output, and its monitor thread never ends."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


class Runner:
    """One loaded model. Not thread-safe: the scheduler's thread owns it. Raises ModelError if the model cannot be loaded."""

    def __init__(
        self, ref: str, spec: ModelSpec, *, page_size: int, compute: Compute = "auto", device: str = "cpu"
    ) -> None:
        self.spec = spec
        self.shape = spec.page_shape(page_size)
        self.device = torch.device(device)
        self.dtype, reason = compute_dtype(compute, self.device)
        log.info("%s: computing in %s on %s: %s", spec.name, self.dtype, self.device, reason)
        self._model = self._load(ref)
        # transformers 5.24 renamed `past_key_values` to `cache`; asking the signature serves both without warnings.
        names = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    def _load(self, ref: str) -> Any:
        try:
            with _quiet():
                model = AutoModelForCausalLM.from_pretrained(
                    ref, dtype=self.dtype, attn_implementation=ATTENTION, use_safetensors=True
                )
        except (OSError, ValueError, RuntimeError) as e:
            raise ModelError(f"cannot load the model: {e}", key=ref) from e
        have = int(model.config.num_hidden_layers)
        if have != self.spec.num_layers:
            raise ModelError("model and spec differ in layers", key=ref, need=str(self.spec.num_layers), have=str(have))
        return model.to(self.device).eval()

    @property
    def eos(self) -> frozenset[int]:
        """Tokens that end an answer, as the model's generation config (or else its config) says."""
        ids = getattr(self._model.generation_config, "eos_token_id", None) or self._model.config.eos_token_id
        return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])

    def new_sequence(self, capacity: int) -> SequenceKV:
        return SequenceKV(self.shape, dtype=self.dtype, device=self.device, capacity=capacity)

    @torch.inference_mode()
    def forward(self, sequences: Sequence[SequenceKV], tokens: Sequence[Sequence[int]], *, keep: int) -> Tensor:
        """Append `tokens[i]` to `sequences[i]` and return float32 logits `[batch, keep, vocab]` of the last `keep` positions.

        Either one sequence with any number of tokens (prefill) or one token for each of several (decode).
        """
        new = len(tokens[0])
        if len(sequences) > 1 and new != 1:
            raise ValueError("several sequences take one token each")
        for s in sequences:
            s.reserve(s.length + new)
        start = torch.tensor([[s.length] for s in sequences], device=self.device)
        out = self._model(
            input_ids=torch.tensor(tokens, device=self.device),
            position_ids=start + torch.arange(new, device=self.device),
            attention_mask=causal_mask(sequences[0].length, new, self.device),
            use_cache=True,
            logits_to_keep=max(1, keep),
            **{self._cache_name: RaggedCache(sequences)},
        )
        for s in sequences:
            s.length += new
        logits = out.logits.float().cpu()
        return logits if keep else logits[:, :0]
