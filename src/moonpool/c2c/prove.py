"""The check behind an alias: that two model folders give the same KV, by what they are and by what they do.

1. one tokenizer, one shape, one rotary embedding, and configs that are equal in all that can touch KV;
2. every weight but the head's is equal, by sha256 (embeddings and all blocks: KV depends on each of them);
3. both models run over the same sample tokens, and their KV is compared bit for bit.

A folder with an adapter is its base for the first two; the adapter may only act from an invocation sequence on, which its
`adapter_config.json` names (`alora_invocation_tokens`).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from moonpool.c2c.alias import ADAPTER_CONFIG, Proof, Proven, equal_tokens
from moonpool.c2c.fitting.capture import KV, CausalModel
from moonpool.c2c.signature import Difference, ModelSpec, check_contract, check_pair, differences, load_spec
from moonpool.errors import ConversionRefused, ModelError
from moonpool.keys import digest

SAMPLE_TOKENS = 192
_HEAD = "lm_head."
_ADAPTER_WEIGHTS = "adapter_model"
_HARMLESS = frozenset({
    "_name_or_path", "architectures", "transformers_version", "use_cache", "tie_word_embeddings", "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "max_position_embeddings", "chunk_size_feed_forward",
    "id2label", "label2id", "output_attentions", "output_hidden_states", "return_dict", "problem_type",
})  # fmt: skip
"""Fields of a config that no key or value depends on. `max_position_embeddings` is among them because what a rotary embedding
takes from it stands in the spec's `rope`."""
_ALWAYS_ACTIVE = ("bias", "modules_to_save", "trainable_token_indices", "layer_replication")
"""What an adapter may replace for all tokens, invoked or not."""
_NOT_OF_KV = ("name", "revision", "max_positions")


def prove(source: Path, target: Path, *, tokens: int = SAMPLE_TOKENS, seed: int = 0) -> Proof:
    """Compare the two folders. Memory: one model in fp32.

    Raises ConversionRefused that names what differs (a field, a weight, a layer's KV), ModelError for what is no model.
    """
    pair = load_spec(source), load_spec(target)
    key = f"{pair[0].name} → {pair[1].name}"
    _check_configs(source, target, pair, key)
    until = [u for folder in (source, target) if (u := _invocation(folder))]
    weights = _equal_weights(source, target, key)
    sample = _sample(pair[0].vocab_size, tokens, until, seed)
    return Proof(
        source=Proven.of(source, pair[0]),
        target=Proven.of(target, pair[1]),
        tokenizer=pair[0].tokenizer,
        until=until,
        tensors=len(weights),
        weights=digest("moonpool.weights", sorted(weights.items())),
        tokens=tokens,
        kv=_equal_kv(source, target, sample, key),
    ).sealed()


def _check_configs(source: Path, target: Path, pair: tuple[ModelSpec, ModelSpec], key: str) -> None:
    check_pair(*pair)
    fix = "KV that differs by construction needs a projector, not an alias."
    check_contract(key, differences(*pair, but=_NOT_OF_KV), fix=fix)
    configs = [_config(folder) for folder in (source, target)]
    fields = sorted(set(configs[0]) | set(configs[1]))
    a, b = ([str(c.get(f)) for f in fields] for c in configs)
    found = [
        Difference(f"config.{f}", x, y) for f, x, y in zip(fields, a, b, strict=True) if x != y and f not in _HARMLESS
    ]
    check_contract(key, found, fix=fix)


def _config(folder: Path) -> dict[str, Any]:
    """With the defaults that this release of transformers fills in."""
    try:
        return dict(AutoConfig.from_pretrained(folder, local_files_only=True).to_dict())
    except (OSError, ValueError, StrictDataclassError) as e:
        raise ModelError(f"unreadable config: {e}", key=str(folder)) from e


def _invocation(folder: Path) -> list[int]:
    """The tokens from which on the folder's adapter acts; empty where there is no adapter. Raises ConversionRefused for an
    adapter that always acts."""
    path = folder / ADAPTER_CONFIG
    if not path.exists():
        return []
    try:
        config = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as e:
        raise ModelError("unreadable adapter config", key=str(path), have=str(e)) from e
    if always := [f for f in _ALWAYS_ACTIVE if config.get(f) not in (None, False, "none", [], {})]:
        raise ConversionRefused(
            "the adapter changes more than what waits for its invocation", key=str(path), have=always[0]
        )
    found = config.get("alora_invocation_tokens")
    if not isinstance(found, list) or not found or not all(isinstance(t, int) and t >= 0 for t in found):
        raise ConversionRefused(
            "the adapter acts from the first token on, so its KV is not the base's",
            key=str(path), need="alora_invocation_tokens", have=str(found),
        )  # fmt: skip
    return found


def _equal_weights(source: Path, target: Path, key: str) -> dict[str, str]:
    """Name → sha256 of every weight that KV depends on. Raises ConversionRefused that names those that differ."""
    a, b = dict(_sums(source)), dict(_sums(target))
    wrong = [f"{n} is not in the target" for n in a if n not in b] + [
        f"{n} is not in the source" for n in b if n not in a
    ]
    wrong += [f"{n} differs" for n in a if n in b and a[n] != b[n]]
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ConversionRefused(f"weights: {', '.join(sorted(wrong)[:8])}{more}", key=key)
    return a


def _sums(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*.safetensors")):
        if path.name.startswith(_ADAPTER_WEIGHTS):
            continue
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if not name.startswith(_HEAD):
                        yield name, _sum(file.get_tensor(name))
        except (OSError, SafetensorError) as e:
            raise ModelError("cannot read the weights", key=str(path), have=str(e)) from e


def _sum(tensor: Tensor) -> str:
    found = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _sample(vocab: int, count: int, until: list[list[int]], seed: int) -> Tensor:
    """Random tokens without an invocation sequence."""
    rng = random.Random(seed)
    first = {u[0] for u in until}
    tokens = [t for t in (rng.randrange(vocab) for _ in range(4 * count + 64)) if t not in first][:count]
    assert equal_tokens(tokens, until) == len(tokens) == count
    return torch.tensor(tokens)


def _equal_kv(source: Path, target: Path, tokens: Tensor, key: str) -> str:
    """Digest of both models' KV of `tokens`, as the pool stores it. Raises ConversionRefused that names the first layer that
    differs."""
    a = CausalModel(source).kv(tokens)
    b = CausalModel(target).kv(tokens)
    for layer in range(a.k.shape[1]):
        for half, x, y in (("keys", a.k, b.k), ("values", a.v, b.v)):
            if not torch.equal(x[:, layer], y[:, layer]):
                raise ConversionRefused(f"the {half} of layer {layer} differ", key=key)
    return digest("moonpool.kv", [("k", _bytes(a, 0)), ("v", _bytes(a, 1))])


def _bytes(kv: KV, half: int) -> bytes:
    tensor: Any = (kv.k, kv.v)[half].contiguous().view(torch.uint8).numpy()
    return bytes(tensor.tobytes())
