"""What a model's KV cache is: its shape, rotary embedding and tokenizer, read from the model's own `config.json`.

`load_spec` never takes a number from a person. What the converter cannot handle (sliding windows, latent attention, quantised
KV, frequencies that change with the length) is refused with the reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from moonpool import paths
from moonpool.errors import ConversionRefused, ModelError
from moonpool.keys import KVIdentity, digest
from moonpool.types import PageShape

_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_QK_NORM = frozenset({"qwen3", "qwen3_moe"})
_SUPPORTED = frozenset({"llama", "qwen2", "qwen3", "mistral", "qwen2_moe", "qwen3_moe"})
_DERIVED_KV_HEADS = frozenset({"llama"})
"""Types whose KV heads are the attention heads where `config.json` does not say; for the others transformers has a constant."""
_FIXED_HEAD_DIM = frozenset({"qwen3"})
"""Types whose head_dim is not hidden / heads where `config.json` does not say."""
_WINDOW_BY_DEFAULT = {"mistral": 4096}
_DIGEST = re.compile(r"[0-9a-f]{32}")


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
    """Context length that llama3 and yarn scaling start from; 0 for kinds that have none, so that two models that differ only
    in their longest context have equal embeddings."""
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
    intermediate: int = 0
    """Width of the gated feed-forward layer that a token passes through; of a mixture of experts, that of its chosen and shared
    experts together, as the mean over the layers. For costs only; 0 = not known."""

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
        return _spec(_folder_name(folder), _weights_revision(folder), config, tokenizer_digest(tokenizer))
    config_path, commit = _hub_file(str(ref), "config.json", None)
    tokenizer_path, _ = _hub_file(str(ref), "tokenizer.json", commit)
    return _spec(str(ref), commit, _read(config_path), tokenizer_digest(_read(tokenizer_path)))


def load_shape(ref: str | Path) -> ModelSpec:
    """A model's numbers from its `config.json` alone: a file, a folder, or a hub name; no weights are needed or read.

    Its revision is empty, and so is its tokenizer unless a `tokenizer.json` lies beside the file: good for costs, not for
    identities. Raises ModelError.
    """
    path = Path(ref)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        return _spec(str(ref), "", _read(_hub_file(str(ref), "config.json", None)[0]), "")
    beside = path.with_name("tokenizer.json")
    name = _folder_name(path.parent) if path.name == "config.json" else path.stem
    return _spec(name, "", _read(path), tokenizer_digest(_read(beside)) if beside.is_file() else "")


def _folder_name(folder: Path) -> str:
    return Path(os.path.abspath(folder)).name  # noqa: PTH100 - `resolve` would follow a link and change the name


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as e:
        raise ModelError("cannot read the model's file", key=str(path), have=e.strerror or str(e)) from e
    except (ValueError, RecursionError) as e:
        raise ModelError(f"not JSON: {e}", key=str(path), fix="Fetch the model again.") from e
    if not isinstance(found, dict):
        raise ModelError("not a JSON object", key=str(path))
    return found


def _hub_file(repo: str, name: str, revision: str | None) -> tuple[Path, str]:
    """A file of a hub repository and the commit it is from; from the hub's own cache where there is no network."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(hf_hub_download(repo, name, revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as e:
        raise ModelError(
            f"no such folder, and the hub gives no {name} ({type(e).__name__})",
            key=repo,
            fix="Give a folder with config.json, or a hub name while online.",
        ) from e
    return path, path.parent.name


def _spec(name: str, revision: str, raw: dict[str, Any], tokenizer: str) -> ModelSpec:
    config = {**raw, **(raw.get("text_config") or {})}
    model_type = str(config.get("model_type", ""))
    _refuse_unsupported(name, model_type, config)
    try:
        head_dim = _head_dim(model_type, config)
        return ModelSpec(
            name=name,
            revision=revision,
            tokenizer=tokenizer,
            model_type=model_type,
            num_layers=_count(config, "num_hidden_layers"),
            num_heads=_count(config, "num_attention_heads"),
            num_kv_heads=_kv_heads(model_type, config),
            head_dim=head_dim,
            hidden=_count(config, "hidden_size"),
            rope=_rope(name, config, head_dim),
            qk_norm=model_type in _QK_NORM,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            max_positions=_count(config, "max_position_embeddings"),
            vocab_size=_count(config, "vocab_size"),
            intermediate=_intermediate(config),
        )
    except KeyError as e:
        raise ModelError(f"config.json lacks {e.args[0]}", key=name) from e
    except (TypeError, ValueError, AttributeError) as e:
        raise ModelError(f"config.json: {e}", key=name) from e


def _count(config: dict[str, Any], field: str) -> int:
    value = config[field]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{field} is no positive whole number but {value!r}")
    return value


def _head_dim(model_type: str, config: dict[str, Any]) -> int:
    if config.get("head_dim") is not None or model_type in _FIXED_HEAD_DIM:
        return _count(config, "head_dim")
    return _count(config, "hidden_size") // _count(config, "num_attention_heads")


def _kv_heads(model_type: str, config: dict[str, Any]) -> int:
    if config.get("num_key_value_heads") is None and model_type in _DERIVED_KV_HEADS:
        return _count(config, "num_attention_heads")
    return _count(config, "num_key_value_heads")


def _intermediate(config: dict[str, Any]) -> int:
    """0 where `config.json` leaves it to the library's default: a cost can be unknown, a model with unknown cost still serves."""
    dense = int(config.get("intermediate_size") or 0)
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    if not experts:
        return dense
    layers, step = int(config["num_hidden_layers"]), int(config.get("decoder_sparse_step") or 1)
    only_dense = set(config.get("mlp_only_layers") or [])
    sparse = sum(i not in only_dense and (i + 1) % step == 0 for i in range(layers))
    chosen = int(config.get("num_experts_per_tok") or 0) * int(config.get("moe_intermediate_size") or 0)
    chosen += int(config.get("shared_expert_intermediate_size") or 0)
    return round((sparse * chosen + (layers - sparse) * dense) / layers)


def _refuse_unsupported(name: str, model_type: str, config: dict[str, Any]) -> None:
    why = next(_reasons_against(model_type, config), "")
    if why:
        raise ModelError(f"unsupported model: {why}", key=name, need=", ".join(sorted(_SUPPORTED)))


def _reasons_against(model_type: str, config: dict[str, Any]) -> Iterator[str]:
    layer_types = {str(t) for t in config.get("layer_types") or ["full_attention"]}
    quantisation = config.get("quantization_config") or {}
    if config.get("kv_lora_rank"):
        yield "its KV is a latent (MLA), not keys and values"
    if layer_types != {"full_attention"}:
        yield f"not every layer is full attention ({', '.join(sorted(layer_types))})"
    windowed = config.get("use_sliding_window", model_type in _WINDOW_BY_DEFAULT)
    if windowed and config.get("sliding_window", _WINDOW_BY_DEFAULT.get(model_type, 4096)):
        yield "sliding-window attention: a page may hold keys that the target still needs and the source has dropped"
    if config.get("dual_chunk_attention_config"):
        yield "dual-chunk attention: a key's rotation depends on the chunk that reads it"
    if quantisation.get("kv_cache_scheme") or quantisation.get("kv_cache_quant_algo"):
        yield "its KV is quantised"
    if model_type not in _SUPPORTED:
        yield f"model type `{model_type}` is not known to store plain rotary KV"


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
    base = RopeSpec(
        theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        kind=kind,
        rotary_dim=int(head_dim * partial),
    )
    found = base if kind == "default" else msgspec.structs.replace(base, **_scaling(kind, rope, config))
    if kind == "llama3" and not 0 < found.low_freq_factor < found.high_freq_factor:
        raise ValueError("llama3 scaling needs 0 < low_freq_factor < high_freq_factor")
    numbers = [v for v in msgspec.structs.astuple(found) if isinstance(v, float)]
    if (
        found.theta <= 1
        or found.factor <= 0
        or found.rotary_dim < 2
        or found.rotary_dim % 2
        or found.rotary_dim > head_dim
    ):
        raise ValueError(f"impossible rotary embedding {rope}")
    if not all(math.isfinite(n) for n in numbers):
        raise ValueError(f"rotary embedding with NaN or Inf: {rope}")
    return found


def _scaling(kind: str, rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Parameters that this kind of scaling uses, and no others: what is not used must not tell two models apart."""
    original = _count(rope if rope.get("original_max_position_embeddings") else config, _original_field(rope))
    given = rope.get("factor")
    factor = config["max_position_embeddings"] / original if kind == "yarn" and given is None else rope["factor"]
    found: dict[str, Any] = {"factor": float(factor)}
    if kind == "llama3":
        found |= {f: float(rope[f]) for f in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        found |= {
            "beta_fast": float(rope.get("beta_fast") or 32.0),
            "beta_slow": float(rope.get("beta_slow") or 1.0),
            "mscale": float(rope.get("mscale") or 0.0),
            "mscale_all_dim": float(rope.get("mscale_all_dim") or 0.0),
            "attention_factor": float(rope.get("attention_factor") or 0.0),
            "truncate": bool(rope.get("truncate", True)),
        }
    return found if kind == "linear" else {**found, "original_max_positions": original}


def _original_field(rope: dict[str, Any]) -> str:
    field = "original_max_position_embeddings"
    return field if rope.get(field) else "max_position_embeddings"


def tokenizer_digest(tokenizer: dict[str, Any]) -> str:
    """Digest of what decides token ids: formatting of the file, the way back from ids to text, truncation and padding do not
    count, and neither does which release of `tokenizers` wrote it (merges as text or as pairs, defaults spelt out or not)."""
    deciding = {k: v for k, v in tokenizer.items() if k not in ("truncation", "padding", "version", "decoder")}
    model = deciding.get("model")
    if isinstance(model, dict):
        spelt = {k: v for k, v in model.items() if v is not None and v is not False and v != ""}
        if isinstance(merges := spelt.get("merges"), list):
            spelt["merges"] = [m.split(" ", 1) if isinstance(m, str) else m for m in merges]
        deciding["model"] = spelt
    canonical = json.dumps(deciding, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return digest("moonpool.tok", [("tokenizer", canonical)])


def _weights_revision(folder: Path) -> str:
    """Digest over the weight files' content. Hashing gigabytes takes seconds, so the result is cached by size and times."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError("no *.safetensors in the model folder", key=str(folder), fix="Only safetensors are read.")
    try:
        stats = [f.stat() for f in files]
        # The change time too: a copy that keeps the modification time must not pass for the file that it replaced.
        stamp = [(f.name, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for f, s in zip(files, stats, strict=True)]
        cached = paths.cache_dir() / "revisions" / digest("moonpool.path", [("at", f"{folder.resolve()} {stamp}")])
        known = _cached_digest(cached)
        return known or _remember(cached, digest("moonpool.rev", [(f.name, _sha256(f)) for f in files]))
    except OSError as e:
        raise ModelError("cannot read the weights", key=str(folder), have=e.strerror or str(e)) from e


def _cached_digest(path: Path) -> str:
    """A digest that was kept; empty where there is none or the file is damaged."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = path.read_text()
        if _DIGEST.fullmatch(text):
            return text
    return ""


def _remember(path: Path, found: str) -> str:
    temporary = path.with_suffix(f".{os.getpid()}.{os.urandom(4).hex()}.tmp")
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(found)
        temporary.replace(path)
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


class Difference(NamedTuple):
    """One field that is not what it must be."""

    field: str
    """Dotted, as `rope.theta`."""
    need: str
    have: str


def differences(need: msgspec.Struct, have: msgspec.Struct, *, but: Sequence[str] = ("name",)) -> list[Difference]:
    """Every field of `need` in which `have` differs, except those in `but`; nested structs are compared field by field."""
    found: list[Difference] = []
    for field in need.__struct_fields__:
        a, b = getattr(need, field), getattr(have, field)
        if field in but or a == b:
            continue
        if isinstance(a, msgspec.Struct) and type(a) is type(b):
            found += [Difference(f"{field}.{d.field}", d.need, d.have) for d in differences(a, b, but=())]
        else:
            found.append(Difference(field, str(a), str(b)))
    return found


def check_contract(what: str, found: Sequence[Difference], fix: str = "") -> None:
    """Raises ConversionRefused that names every differing field, what each must be and what it is; nothing if there is none."""
    if found:
        raise ConversionRefused(
            f"differs in {', '.join(d.field for d in found)}",
            key=what,
            need=", ".join(f"{d.field}={d.need}" for d in found),
            have=", ".join(f"{d.field}={d.have}" for d in found),
            fix=fix,
        )


def check_pair(source: ModelSpec, target: ModelSpec) -> None:
    """Raises ConversionRefused unless pages of the two models cover the same tokens (one tokenizer; vocabularies may be
    padded differently)."""
    check_contract(
        f"{source.name} → {target.name}",
        [Difference("tokenizer", target.tokenizer, source.tokenizer)] if source.tokenizer != target.tokenizer else [],
        fix="Source and target must share one tokenizer, or their pages cover different tokens.",
    )
