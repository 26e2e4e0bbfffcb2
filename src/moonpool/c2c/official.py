"""Published C2C checkpoints (Hugging Face `nics-efc/C2C_Fuser`) as a `Fuser`, to be written as a bundle once.

    projector_{i}.json     {"class": "C2CProjector", "init_args": {...}}; a dtype stands there as {"__type__": "torch.dtype", ...}
    projector_{i}.pt       its weights
    projector_config.json  {receiver: {sharer: {target layer: [[source layer, i]]}}}

Sizes are checked against both models, and every weight by name and shape: one that is missing, misshapen or unknown is an error,
since whoever loads these files leniently serves a fuser with random parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from moonpool.c2c.official_file import read_tensors
from moonpool.c2c.projectors import build
from moonpool.c2c.projectors.fuse import NATIVE, FuseParameters, Fuser, layer_shapes, stored_name
from moonpool.c2c.signature import Difference, ModelSpec, check_contract
from moonpool.errors import BundleCorrupt, ConversionRefused

CLASS = "C2CProjector"
CONFIG = "projector_config.json"
_MAX_TEXT_BYTES = 16 << 20
_BUFFERS = frozenset({"gate_temperature"})
"""State of the training's Gumbel noise; at inference the gate is hard."""
_UNUSED_FILES = re.compile(r"aggregator_(\d+\.(pt|json)|config\.json)|training_state\.pt")


class InitArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the published class was made with. An argument that is not known here could change the formula: it is refused."""

    source_dim: int
    target_dim: int
    source_num_heads: int = 1
    target_num_heads: int = 1
    intermediate_dim: int = 1024
    hidden_dim: int = 1024
    num_layers: int = 3
    # Of the training only:
    dropout: float = 0.0
    initial_temperature: float = 1.0
    final_temperature: float = 0.001
    anneal_steps: int = 0
    zero_init: bool = False
    dtype: str | dict[str, str] | None = None

    def shape(self) -> tuple[int, ...]:
        """What must be equal in all layers."""
        heads = (self.source_num_heads, self.source_dim, self.target_num_heads, self.target_dim)
        return (*heads, self.hidden_dim, self.intermediate_dim, self.num_layers)


class _Description(msgspec.Struct, frozen=True):
    kind: str = msgspec.field(name="class")
    init_args: dict[str, Any] = {}


Alignment = dict[str, dict[str, dict[str, list[tuple[int, int]]]]]


@dataclass(frozen=True, slots=True)
class Imported:
    fuser: Fuser
    dtype: torch.dtype
    """Of the published weights."""
    notes: list[str]
    """What was there and not used."""


def read_checkpoint(folder: Path, source: ModelSpec, target: ModelSpec) -> Imported:
    """A published folder (or one that holds it as `final/`) for these models.

    Memory: the weights in fp32. Raises BundleCorrupt (files), ConversionRefused (made for models of other sizes).
    """
    if not (folder / CONFIG).is_file() and (folder / "final" / CONFIG).is_file():
        folder = folder / "final"
    layers = _alignment(folder)
    args = {i: _init_args(folder, i) for i in sorted({i for _, i in layers.values()})}
    parameters = _parameters(folder, args, layers, source, target)
    tensors: dict[str, Tensor] = {}
    for t, (_, i) in sorted(layers.items()):
        tensors |= {stored_name(t, n): w for n, w in _weights(folder / f"projector_{i}.pt", parameters).items()}
    dtypes = {t.dtype for t in tensors.values()}
    dtype = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
    fuser = build(Fuser, msgspec.to_builtins(parameters), tensors)
    return Imported(fuser, dtype, list(_notes(folder, set(args), target.num_layers - len(layers))))


def _alignment(folder: Path) -> dict[int, tuple[int, int]]:
    """Target layer → (source layer, projector)."""
    path = folder / CONFIG
    raw: Alignment = _typed(path, Alignment)
    receivers = list(raw.values())
    sharers = list(receivers[0].values()) if len(receivers) == 1 else []
    if len(sharers) != 1:
        have = f"{len(receivers)} receivers, {sum(map(len, receivers))} sharers"
        raise BundleCorrupt("not one pair of models", key=str(path), need="one receiver, one sharer", have=have)
    found: dict[int, tuple[int, int]] = {}
    for name, pairs in sharers[0].items():
        if not name.isdecimal() or len(pairs) != 1 or min(pairs[0]) < 0:
            need = "a layer number with one [source layer, projector]"
            raise BundleCorrupt(f"layer {name}", key=str(path), need=need, have=str([list(p) for p in pairs]))
        found[int(name)] = pairs[0]
    if not found:
        raise BundleCorrupt("no layer is fused", key=str(path))
    return found


def _init_args(folder: Path, index: int) -> InitArgs:
    path = folder / f"projector_{index}.json"
    found: _Description = _typed(path, _Description)
    if found.kind != CLASS:
        raise ConversionRefused(
            "another class than the published fuser's", key=str(path), need=CLASS, have=found.kind,
            fix="Only its formula is known here.",
        )  # fmt: skip
    args: InitArgs = _converted(path, found.init_args, InitArgs)
    if isinstance(args.dtype, dict) and args.dtype.get("__type__") != "torch.dtype":
        raise BundleCorrupt("a dtype that is none", key=str(path), have=str(args.dtype))
    if args.num_layers < 3:
        raise BundleCorrupt("num_layers too small", key=str(path), need=">= 3", have=str(args.num_layers))
    return args


def _parameters(
    folder: Path,
    args: dict[int, InitArgs],
    layers: dict[int, tuple[int, int]],
    source: ModelSpec,
    target: ModelSpec,
) -> FuseParameters:
    first, *others = args
    for i in others:
        if args[i].shape() != args[first].shape():
            key = str(folder / f"projector_{i}.json")
            raise BundleCorrupt("of another shape", key=key, need=str(args[first].shape()), have=str(args[i].shape()))
    a = args[first]
    facts = (
        ("source.num_kv_heads", a.source_num_heads, source.num_kv_heads),
        ("source.head_dim", a.source_dim, source.head_dim),
        ("target.num_kv_heads", a.target_num_heads, target.num_kv_heads),
        ("target.head_dim", a.target_dim, target.head_dim),
    )
    wrong = [Difference(field, str(need), str(have)) for field, need, have in facts if need != have]
    tops = (("source", max(s for s, _ in layers.values()), source), ("target", max(layers), target))
    wrong += [
        Difference(f"{role}.num_layers", f"at least {top + 1}", str(model.num_layers))
        for role, top, model in tops
        if top >= model.num_layers
    ]
    check_contract(
        f"{folder} for {source.name} → {target.name}",
        wrong,
        fix="Give the models that the checkpoint was trained for, sharer as source and receiver as target.",
    )
    return FuseParameters(
        source_layers=source.num_layers,
        source_heads=source.num_kv_heads,
        source_head_dim=source.head_dim,
        target_layers=target.num_layers,
        target_heads=target.num_kv_heads,
        target_head_dim=target.head_dim,
        hidden=a.hidden_dim,
        intermediate=a.intermediate_dim,
        blocks=a.num_layers - 2,
        sources=[layers[t][0] if t in layers else NATIVE for t in range(target.num_layers)],
    )


def _weights(path: Path, parameters: FuseParameters) -> dict[str, Tensor]:
    """One layer's weights, with every misfit of the file in one error."""
    found = {n: t for n, t in read_tensors(path).items() if n not in _BUFFERS}
    need = layer_shapes(parameters)
    wrong = [f"{n} is missing" for n in need if n not in found]
    wrong += [f"{n} is unknown" for n in found if n not in need]
    wrong += [
        f"{n} is {list(found[n].shape)}, not {list(shape)}"
        for n, shape in need.items()
        if n in found and tuple(found[n].shape) != shape
    ]
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise BundleCorrupt(f"weights do not fit: {', '.join(wrong[:8])}{more}", key=str(path))
    return found


def _notes(folder: Path, used: set[int], native: int) -> Iterator[str]:
    if native:
        yield f"{native} target layers have no fuser and stay native"
    names = [f.name for f in folder.iterdir()]
    if old := sorted(n for n in names if _UNUSED_FILES.fullmatch(n)):
        yield f"not used (older releases, training): {', '.join(old[:4])}{' …' if len(old) > 4 else ''}"
    there = {int(m[1]) for n in names if (m := re.fullmatch(r"projector_(\d+)\.pt", n))}
    if spare := sorted(there - used):
        yield f"no layer uses projector {', '.join(map(str, spare))}"


def _typed(path: Path, kind: Any) -> Any:
    try:
        with path.open("rb") as f:
            raw = f.read(_MAX_TEXT_BYTES + 1)
        if len(raw) > _MAX_TEXT_BYTES:
            raise BundleCorrupt("file too large", key=str(path), need=f"<= {_MAX_TEXT_BYTES} B")
        found = json.loads(raw)
    except OSError as e:
        raise BundleCorrupt("not a published checkpoint", key=str(path), have=e.strerror or str(e)) from e
    except (ValueError, RecursionError) as e:
        raise BundleCorrupt(f"not JSON: {e}", key=str(path)) from e
    return _converted(path, found, kind)


def _converted(path: Path, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        raise BundleCorrupt(str(e), key=str(path)) from e
