"""What a model's KV cache is: its shape, rotary embedding and tokenizer, read from the model's own `config.json`.

`load_spec` never takes a number from a person. What the converter cannot handle (sliding windows, latent attention, quantised
KV, frequencies that change with the length) is refused with the reason.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from moonpool import paths
from moonpool.errors import ConversionRefused, ModelError
from moonpool.keys import KVIdentity, digest
from moonpool.types import PageShape

_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_QK_NORM = frozenset({"qwen3", "qwen3_moe", "gemma3_text", "olmo2"})
_SUPPORTED = frozenset({"llama", "qwen2", "qwen3", "mistral", "qwen2_moe", "qwen3_moe"})
_WEIGHT_FILES = ("*.safetensors",)


class RopeSpec(msgspec.Struct, frozen=True):
    """Rotary position embedding, half-split convention (first half of the rotated dims pairs with the second)."""

    theta: float
    kind: str = "default"
    rotary_dim: int = 0
    """Leading dims of a head that are rotated."""
    factor: float = 1.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float = 0.0
    """As the config gives it; 0 = derived from `factor` where the kind has one."""
    truncate: bool = True


class ModelSpec(msgspec.Struct, frozen=True):
    """A model as the pool and the converter see it."""

    name: str
    revision: str
    tokenizer: str
    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    rope: RopeSpec
    qk_norm: bool
    dtype: str
    max_positions: int
    vocab_size: int

    def identity(self, page_size: int, *, salt: str = "", tenant: str = "", kv_dtype: str = "bfloat16") -> KVIdentity:
        """Identity of this model's pages (all layers, one rank, no adapter)."""
        return KVIdentity(
            model=self.name,
            revision=self.revision,
            tokenizer=self.tokenizer,
            kv_dtype=kv_dtype,
            page_size=page_size,
            layer_end=self.num_layers,
            salt=salt,
            tenant=tenant,
        )

    def page_shape(self, page_size: int) -> PageShape:
        return PageShape(page_size, self.num_layers, self.num_kv_heads, self.head_dim)


def load_spec(ref: str | Path) -> ModelSpec:
    """Parameters of a local model folder or of a hub model (`org/name`; only its config and tokenizer are fetched).

    Raises ModelError: nothing there, unreadable, or of a kind whose KV cannot be converted.
    """
    folder = Path(ref)
    if folder.is_dir():
        config, tokenizer = _read(folder / "config.json"), _read(folder / "tokenizer.json")
        return _spec(folder.name, _weights_revision(folder), config, tokenizer)
    config_path, commit = _hub_file(str(ref), "config.json")
    tokenizer_path, _ = _hub_file(str(ref), "tokenizer.json")
    return _spec(str(ref), commit, _read(config_path), _read(tokenizer_path))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as e:
        raise ModelError("cannot read the model's file", key=str(path), have=e.strerror or str(e)) from e
    except ValueError as e:
        raise ModelError(f"not JSON: {e}", key=str(path), fix="Fetch the model again.") from e
    if not isinstance(found, dict):
        raise ModelError("not a JSON object", key=str(path))
    return found


def _hub_file(repo: str, name: str) -> tuple[Path, str]:
    """A file of a hub repository and the commit it is from."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(hf_hub_download(repo, name))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as e:
        raise ModelError(
            f"no such folder, and the hub gives no {name} ({type(e).__name__})",
            key=repo,
            fix="Give a folder with config.json, or a hub name while online.",
        ) from e
    return path, path.parent.name


def _spec(name: str, revision: str, raw: dict[str, Any], tokenizer: dict[str, Any]) -> ModelSpec:
    config = {**raw, **raw.get("text_config", {})}
    model_type = str(config.get("model_type", ""))
    _refuse_unsupported(name, model_type, config)
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        head_dim = int(config.get("head_dim") or hidden // heads)
        return ModelSpec(
            name=name,
            revision=revision,
            tokenizer=tokenizer_digest(tokenizer),
            model_type=model_type,
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            hidden=hidden,
            rope=_rope(name, config, head_dim),
            qk_norm=model_type in _QK_NORM,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            max_positions=int(config["max_position_embeddings"]),
            vocab_size=int(config["vocab_size"]),
        )
    except KeyError as e:
        raise ModelError(f"config.json lacks {e.args[0]}", key=name) from e


def _refuse_unsupported(name: str, model_type: str, config: dict[str, Any]) -> None:
    why = ""
    layer_types = set(config.get("layer_types") or ["full_attention"])
    if config.get("kv_lora_rank"):
        why = "its KV is a latent (MLA), not keys and values"
    elif layer_types != {"full_attention"} or (config.get("use_sliding_window") and config.get("sliding_window")):
        why = f"not every layer is full attention ({', '.join(sorted(layer_types))})"
    elif model_type not in _SUPPORTED:
        why = f"model type `{model_type}` is not known to store plain rotary KV"
    elif config.get("model_type") == "mistral" and config.get("sliding_window"):
        why = "sliding-window attention"
    if why:
        raise ModelError(f"unsupported model: {why}", key=name, need=", ".join(sorted(_SUPPORTED)))


def _rope(name: str, config: dict[str, Any], head_dim: int) -> RopeSpec:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling` (before)."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind not in _ROPE_KINDS:
        raise ModelError(
            f"rotary embedding `{kind}` is not supported: its frequencies depend on the sequence's length, so a stored key "
            "cannot be un-rotated",
            key=name,
            need=", ".join(_ROPE_KINDS),
        )
    partial = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return RopeSpec(
        theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        kind=kind,
        rotary_dim=int(head_dim * partial),
        factor=float(rope.get("factor") or 1.0),
        low_freq_factor=float(rope.get("low_freq_factor") or 0.0),
        high_freq_factor=float(rope.get("high_freq_factor") or 0.0),
        original_max_positions=int(original),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        mscale=float(rope.get("mscale") or 0.0),
        mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
        attention_factor=float(rope.get("attention_factor") or 0.0),
        truncate=bool(rope.get("truncate", True)),
    )


def tokenizer_digest(tokenizer: dict[str, Any]) -> str:
    """Digest of what decides token ids; formatting of the file and settings of truncation or padding do not count."""
    deciding = {k: v for k, v in tokenizer.items() if k not in ("truncation", "padding", "version")}
    canonical = json.dumps(deciding, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return digest("moonpool.tok", [("tokenizer", canonical)])


def _weights_revision(folder: Path) -> str:
    """Digest over the weight files' content. Hashing gigabytes takes seconds, so the result is cached by size and time."""
    files = sorted(f for pattern in _WEIGHT_FILES for f in folder.glob(pattern))
    if not files:
        raise ModelError("no *.safetensors in the model folder", key=str(folder), fix="Only safetensors are read.")
    stamp = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    cached = paths.cache_dir() / "revisions" / digest("moonpool.path", [("at", f"{folder.resolve()} {stamp}")])
    if cached.is_file():
        return cached.read_text()
    found = digest("moonpool.rev", [(f.name, _sha256(f)) for f in files])
    cached.parent.mkdir(parents=True, exist_ok=True)
    temporary = cached.with_suffix(f".{id(files)}.tmp")
    temporary.write_text(found)
    temporary.replace(cached)
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def differences(need: ModelSpec, have: ModelSpec) -> list[tuple[str, str, str]]:
    """(field, need, have) for every field in which the two models' KV differ."""
    return [
        (f, str(getattr(need, f)), str(getattr(have, f)))
        for f in ModelSpec.__struct_fields__
        if f != "name" and getattr(need, f) != getattr(have, f)
    ]


def check_pair(source: ModelSpec, target: ModelSpec) -> None:
    """Raises ConversionRefused unless pages of the two models cover the same tokens (one tokenizer; vocabularies may be
    padded differently)."""
    if source.tokenizer != target.tokenizer:
        raise ConversionRefused(
            "the models differ in tokenizer",
            key=f"{source.name} → {target.name}",
            need=target.tokenizer,
            have=source.tokenizer,
            fix="Source and target must share one tokenizer, or their pages cover different tokens.",
        )
