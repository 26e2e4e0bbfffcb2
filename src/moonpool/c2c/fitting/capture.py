"""Runs a model to get its KV, and runs it over KV that came from somewhere else.

Both halves of judging a projector: `CausalModel.kv` gives what the pool would hold for some tokens, `CausalModel.logits` and
`CausalModel.batch_logits` give what the model says when its cache is injected. Arithmetic is fp32 (the evaluator's) or bf16
(fitting: several times faster where the machine has bf16 units, and what most engines run); KV is rounded to bf16, as the pool
stores it.

Memory: the weights (4 or 2 B × parameters; 6.2 GB for a 1.5B model in fp32) plus, per call, the activations of one chunk. The
KV that comes back takes `4 × tokens × layers × heads × dim` bytes (both halves, bf16).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from moonpool.c2c.signature import ModelSpec, load_spec
from moonpool.errors import ModelError
from moonpool.keys import digest


@dataclass(frozen=True, slots=True)
class KV:
    """KV of some tokens: `k` (after RoPE) and `v`, each `[tokens, layers, heads, dim]`."""

    k: Tensor
    v: Tensor

    def __len__(self) -> int:
        return self.k.shape[0]

    def __getitem__(self, rows: slice) -> KV:
        return KV(self.k[rows], self.v[rows])

    def rounded(self) -> KV:
        """In bf16, to nearest even: what the pool would give back."""
        return KV(self.k.to(torch.bfloat16), self.v.to(torch.bfloat16))


def concat(parts: list[KV]) -> KV:
    """The tokens of all parts, in order."""
    return KV(torch.cat([p.k for p in parts]), torch.cat([p.v for p in parts]))


class CausalModel:
    """A model folder, loaded on a device; arguments may lie on the CPU. Raises ModelError if the folder is none of a supported
    model."""

    def __init__(
        self, folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.folder, self.dtype, self.device = Path(folder), dtype, torch.device(device)
        self.spec: ModelSpec = load_spec(folder)
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        except (OSError, ValueError, SafetensorError) as e:
            raise ModelError(f"cannot load the model: {e}", key=str(folder)) from e
        model.eval().requires_grad_(False).to(self.device)
        self._model: Any = model
        self._base: Any = model.base_model
        self._head: Any = model.get_output_embeddings()
        # transformers renamed the argument in 5.2x; the cache object is the same.
        takes = inspect.signature(self._base.forward).parameters
        self._cache_argument = "cache" if "cache" in takes else "past_key_values"

    @cached_property
    def tokenizer(self) -> Any:
        """The folder's tokenizer (transformers)."""
        return load_tokenizer(self.folder)

    @torch.no_grad()
    def kv(self, tokens: Tensor, *, chunk: int = 1024) -> KV:
        """bf16 KV of `tokens` (`[N]`, at positions 0…N-1), computed `chunk` tokens at a time."""
        cache = self._cache(None, 1)
        for start in range(0, len(tokens), chunk):
            self._hidden(tokens[None, start : start + chunk], cache, start)
        kv = _read_cache(cache).rounded()
        return KV(kv.k.cpu(), kv.v.cpu())

    def logits(self, prefix: KV | None, tokens: Tensor, *, start: int | None = None, grad: bool = False) -> Tensor:
        """fp32 `[M, vocab]`: next-token logits of `tokens` (`[M]`) over the given cache.

        The first token stands at position `start`, by default right after the prefix; keys keep the rotation they have. With
        `grad` gradients flow back into the prefix (never into the model).
        """
        at = start if start is not None else (len(prefix) if prefix else 0)
        with torch.set_grad_enabled(grad):
            return self._head(self._hidden(tokens[None], self._cache(prefix, 1), at)[0]).float()

    @torch.no_grad()
    def batch_logits(self, prefix: KV | None, rows: list[Tensor], *, start: int | None = None) -> list[Tensor]:
        """Like `logits` for several continuations of one prefix in one pass; shorter rows are padded behind their end."""
        at = start if start is not None else (len(prefix) if prefix else 0)
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        hidden = self._hidden(padded, self._cache(prefix, len(rows)), at)
        return [self._head(h[: len(r)]).float() for h, r in zip(hidden, rows, strict=True)]

    @torch.no_grad()
    def extend(self, prefix: KV, tokens: Tensor) -> tuple[Tensor, KV]:
        """`logits` of tokens right after the prefix, and the bf16 KV of prefix and tokens together."""
        cache = self._cache(prefix, 1)
        logits = self._head(self._hidden(tokens[None], cache, len(prefix))[0]).float()
        kv = _read_cache(cache).rounded()
        return logits, KV(kv.k.cpu(), kv.v.cpu())

    @torch.no_grad()
    def greedy(self, prefix: KV, tokens: Tensor, count: int) -> list[int]:
        """The `count` most likely tokens, one after another, behind prefix and `tokens` (one at least)."""
        cache, at, said = self._cache(prefix, 1), len(prefix), tokens
        answer: list[int] = []
        while len(answer) < count:
            last = self._hidden(said[None], cache, at)[0, -1]
            at += len(said)
            said = self._head(last).argmax(-1, keepdim=True).cpu()
            answer.append(int(said))
        return answer

    @torch.no_grad()
    def attention_mass(self, tokens: Tensor) -> Tensor:
        """fp32 `[layers, N]`: attention that each token gets from the tokens behind it, summed over them, mean over heads."""
        self._model.set_attn_implementation("eager")
        try:
            found = self._base(
                input_ids=tokens[None].to(self.device), use_cache=False, output_attentions=True
            ).attentions
        finally:
            self._model.set_attn_implementation("sdpa")
        return torch.stack([a[0].float().mean(0).tril(-1).sum(0).cpu() for a in found])

    @torch.no_grad()
    def queries(self, tokens: Tensor) -> Tensor:
        """`[N, layers, heads, dim]`: what attention asks with in each layer, before RoPE."""
        seen: list[Tensor] = []

        def keep(_module: Any, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen.append(output[0].reshape(len(tokens), self.spec.num_heads, self.spec.head_dim))

        parts = [layer.self_attn for layer in self._base.layers]
        hooks = [getattr(a, "q_norm", a.q_proj).register_forward_hook(keep) for a in parts]
        try:
            self._hidden(tokens[None], self._cache(None, 1), 0)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack(seen, dim=1).cpu()

    @contextmanager
    def attention_outputs(self) -> Iterator[list[Tensor]]:
        """While open, every pass appends to the list what attention gives in each layer, before the output projection:
        `[batch, M, heads * dim]`, layers in order."""
        seen: list[Tensor] = []

        def keep(_module: Any, inputs: tuple[Tensor, ...]) -> None:
            seen.append(inputs[0].detach())

        hooks = [layer.self_attn.o_proj.register_forward_pre_hook(keep) for layer in self._base.layers]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def _hidden(self, tokens: Tensor, cache: Any, start: int) -> Tensor:
        positions = torch.arange(start, start + tokens.shape[1], device=self.device)[None].expand(tokens.shape)
        inputs = {
            "input_ids": tokens.to(self.device),
            "position_ids": positions,
            "use_cache": True,
            self._cache_argument: cache,
        }
        return self._base(**inputs).last_hidden_state

    def _cache(self, prefix: KV | None, batch: int) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        if prefix is not None:
            k, v = (t.to(self.device, self.dtype).permute(1, 2, 0, 3) for t in (prefix.k, prefix.v))
            for layer in range(k.shape[0]):
                cache.update(k[layer][None].expand(batch, -1, -1, -1), v[layer][None].expand(batch, -1, -1, -1), layer)
        return cache


def _read_cache(cache: Any) -> KV:
    """`[1, heads, tokens, dim]` per layer → `[tokens, layers, heads, dim]`."""
    k = torch.stack([layer.keys[0] for layer in cache.layers]).permute(2, 0, 1, 3)
    v = torch.stack([layer.values[0] for layer in cache.layers]).permute(2, 0, 1, 3)
    return KV(k.contiguous(), v.contiguous())


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a model folder. Raises ModelError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as e:
        raise ModelError(f"cannot load the tokenizer: {e}", key=str(folder)) from e


class CaptureStore:
    """KV of documents on disk, one safetensors file each, so that a second fit needs no second pass.

    A file is named after the model's revision and the document's tokens, and is written whole or not at all; an interrupted
    capture goes on where it stopped. The model is loaded only when a document is missing.
    """

    def __init__(
        self, folder: Path, model: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        """`folder` holds the captures, `model` is the model's folder, `dtype` and `device` what it computes in and on."""
        self.work, self.folder, self.dtype, self._device = folder, Path(model), dtype, device
        self.spec = load_spec(model)

    @cached_property
    def model(self) -> CausalModel:
        """The model itself, loaded on first use."""
        return CausalModel(self.folder, self.dtype, self._device)

    def path(self, tokens: Tensor) -> Path:
        raw = tokens.to(torch.int64).numpy().tobytes()
        computed = [] if self.dtype == torch.float32 else [("compute", str(self.dtype))]
        name = digest("moonpool.capture", [("revision", self.spec.revision), ("tokens", raw), *computed])
        return self.work / self.spec.name.replace("/", "-") / f"{name}.safetensors"

    def get(self, tokens: Tensor) -> KV:
        """The document's bf16 KV, read from disk or computed and kept."""
        found = self._kept(self.path(tokens), lambda: _named(self.model.kv(tokens)))
        return KV(found["k"], found["v"])

    def attention_mass(self, tokens: Tensor) -> Tensor:
        """`CausalModel.attention_mass`, kept likewise."""
        path = self.path(tokens).with_suffix(".attention.safetensors")
        return self._kept(path, lambda: {"mass": self.model.attention_mass(tokens)})["mass"]

    def queries(self, tokens: Tensor, at: Tensor) -> Tensor:
        """bf16 `[len(at), layers, heads, dim]`: `CausalModel.queries` at positions `at` (`[n]`), kept likewise."""
        made = digest("moonpool.queries", [("at", at.to(torch.int64).numpy().tobytes())])[:12]
        path = self.path(tokens).with_suffix(f".queries-{made}.safetensors")
        make = lambda: {"queries": self.model.queries(tokens)[at].to(torch.bfloat16)}  # noqa: E731
        return self._kept(path, make)["queries"]

    def missing(self, documents: Sequence[Tensor]) -> int:
        """Documents whose KV is not on disk yet."""
        return sum(not self.path(d).is_file() for d in documents)

    def model_bytes(self) -> int:
        """Memory of the loaded model's weights."""
        stored = sum(f.stat().st_size for f in self.folder.glob("*.safetensors"))
        return stored * self.dtype.itemsize // (4 if self.spec.dtype == "float32" else 2)

    def _kept(self, path: Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        if path.is_file():
            return dict(load_file(path))
        made = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        save_file(made, temporary)
        temporary.replace(path)
        return made


def _named(kv: KV) -> dict[str, Tensor]:
    return {"k": kv.k, "v": kv.v}
