"""Which piece of a tensor a rank holds, and under which key. Pure: no tensor, no store.

Callers say it with the peer's classes (`ParallelAxis`, `TensorParallelism`, `ReadTarget`, or anything with their fields);
inside it is a `Spec`, a tuple of checked axes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from moonpool.integrations.mooncake_api.tensors.header import KINDS, MAX_AXES, TP, Axis, Header, Shape

MAX_PIECES = 4096
"""Of one tensor along one axis. A damaged header must not send a reader to look for millions."""


class ParallelAxis:
    """One kind of parallelism: "dp", "tp", "ep" or "pp"; tp needs `split_dim`, ep `expert_id`, pp `stage_id`."""

    def __init__(self) -> None:
        self.kind = ""
        self.rank = 0
        self.size = 1
        self.split_dim: int | None = None
        self.expert_id: int | None = None
        self.stage_id: int | None = None

    def __setattr__(self, name: str, value: object) -> None:
        """Raises TypeError for a value of the wrong type, AttributeError for a field that there is not."""
        kinds = _FIELDS.get(name)
        if kinds is None:
            raise AttributeError(f"ParallelAxis has no field {name!r}")
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise TypeError(f"ParallelAxis.{name} cannot be {value!r}")
        object.__setattr__(self, name, value)


_FIELDS: dict[str, type | tuple[type, ...]] = {"kind": str, "rank": int, "size": int} | dict.fromkeys(
    ("split_dim", "expert_id", "stage_id"), (int, type(None))
)


class TensorParallelism:
    """Some axes. Assigning copies them, so that one axis object can serve as a template; `axes[i]` can be changed in place."""

    def __init__(self) -> None:
        self._axes: list[ParallelAxis] = []

    @property
    def axes(self) -> list[ParallelAxis]:
        return list(self._axes)

    @axes.setter
    def axes(self, axes: Sequence[ParallelAxis]) -> None:
        if not all(isinstance(a, ParallelAxis) for a in axes):
            raise TypeError("TensorParallelism.axes takes ParallelAxis objects")
        self._axes = [copy.copy(a) for a in axes]

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelism:
        other = TensorParallelism()
        other.axes = self._axes
        return other


class ReadTarget:
    """What to read: "as_stored", "shard" (the piece of `parallelism`) or "full" (all pieces put together)."""

    def __init__(self) -> None:
        self._mode = "as_stored"
        self._parallelism: TensorParallelism | None = None

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if not isinstance(mode, str):
            raise TypeError(f"ReadTarget.mode cannot be {mode!r}")
        if mode.lower() not in MODES:
            raise RuntimeError("Unsupported ReadTarget mode")  # the peer's error
        self._mode = mode.lower()

    @property
    def parallelism(self) -> TensorParallelism | None:
        return self._parallelism

    @parallelism.setter
    def parallelism(self, parallelism: TensorParallelism | None) -> None:
        if not isinstance(parallelism, TensorParallelism | None):
            raise TypeError(f"ReadTarget.parallelism cannot be {parallelism!r}")
        self._parallelism = copy.deepcopy(parallelism)


MODES = ("as_stored", "shard", "full")


class AxisSpec(NamedTuple):
    """A checked axis. Tuples of them in the order of `KINDS` compare and name keys."""

    kind: int
    rank: int
    size: int
    split_dim: int = -1
    expert: int | None = None
    stage: int | None = None

    def stored(self) -> Axis:
        ident = {"ep": self.expert, "pp": self.stage}.get(KINDS[self.kind])
        return Axis(self.kind, self.rank, self.size, self.split_dim, ident or 0)


Spec: TypeAlias = tuple[AxisSpec, ...]


class Partition(NamedTuple):
    """One writer's part of a tensor that several writers hold whole."""

    rank: int
    size: int
    split_dim: int

    @property
    def spec(self) -> Spec:
        return (AxisSpec(TP, self.rank, self.size, self.split_dim),)


class Refusal(ValueError):
    """A request that is none; the text says why. Never leaves this package: callers get the peer's code, and a log line."""


def parse_spec(parallelism: object) -> Spec:
    """The axes of a TensorParallelism-like object, in its order. Raises Refusal."""
    axes = getattr(parallelism, "axes", None)
    if not isinstance(axes, Sequence) or not 1 <= len(axes) <= MAX_AXES:
        raise Refusal(f"parallelism needs 1 to {MAX_AXES} axes")
    spec = tuple(_parse_axis(a) for a in axes)
    if len({a.kind for a in spec}) != len(spec):
        raise Refusal("two axes of one kind")
    return spec


def _parse_axis(axis: object) -> AxisSpec:
    kind = str(getattr(axis, "kind", "")).lower()
    if kind not in KINDS:
        raise Refusal(f"axis kind {kind!r} is none of {', '.join(KINDS)}")
    numbers = [_optional_int(axis, name) for name in ("rank", "size", "split_dim", "expert_id", "stage_id")]
    rank, size, split_dim, expert, stage = numbers
    if rank is None or size is None or not 0 <= rank < size <= MAX_PIECES:
        raise Refusal(f"{kind} axis needs 0 <= rank < size <= {MAX_PIECES}, not {rank} and {size}")
    if (split_dim is None) != (kind != "tp"):
        raise Refusal("the tp axis needs a split_dim, and no other may have one")
    if (kind == "ep" and expert is None) or (kind == "pp" and stage is None):
        raise Refusal(f"the {kind} axis needs {'an expert_id' if kind == 'ep' else 'a stage_id'}")
    if any(n is not None and not -(1 << 31) <= n < 1 << 31 for n in numbers):
        raise Refusal(f"{kind} axis: a number does not fit 32 bits")
    if split_dim is not None and split_dim < 0:
        raise Refusal(f"no dimension {split_dim}")
    return AxisSpec(KINDS.index(kind), rank, size, -1 if split_dim is None else split_dim, expert, stage)


def parse_partition(writer: object) -> Partition:
    """The fields of a writer_partition-like object. Raises Refusal."""
    rank, size, split_dim = (_optional_int(writer, name) for name in ("rank", "size", "split_dim"))
    if rank is None or size is None or split_dim is None:
        raise Refusal("writer_partition needs rank, size and split_dim")
    if not 0 <= rank < size <= MAX_PIECES or not 0 <= split_dim < 1 << 31:
        raise Refusal(f"no such part: rank {rank} of {size} along dimension {split_dim}")
    return Partition(rank, size, split_dim)


def parse_target(target: object) -> tuple[str, Spec | None]:
    """Mode and axes of a ReadTarget-like object; None is "as_stored". Raises Refusal."""
    if target is None:
        return "as_stored", None
    mode = str(getattr(target, "mode", "")).lower()
    if mode not in MODES:
        raise Refusal(f"no such read mode: {mode!r}")
    parallelism = getattr(target, "parallelism", None)
    spec = None if parallelism is None else parse_spec(parallelism)
    if (mode, spec is None) in (("as_stored", False), ("shard", True)):
        raise Refusal(f"mode {mode!r} {'needs a' if spec is None else 'takes no'} parallelism")
    return mode, spec


def _optional_int(owner: object, name: str) -> int | None:
    value = getattr(owner, name, None)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise Refusal(f"{name} must be an integer, not {value!r}")
    return value


def tp_of(spec: Iterable[AxisSpec]) -> AxisSpec | None:
    return next((a for a in spec if a.kind == TP), None)


def with_tp(spec: Spec, rank: int, size: int) -> Spec:
    """The same axes, at another tp piece."""
    return tuple(a._replace(rank=rank, size=size) if a.kind == TP else a for a in spec)


def canonical(spec: Iterable[AxisSpec]) -> Spec:
    return tuple(sorted(spec, key=lambda a: a.kind))


def spec_of(header: Header) -> Spec:
    """The axes that a stored piece names, canonical; empty for a whole tensor."""
    return canonical(
        AxisSpec(
            *(a.kind, a.rank, a.pieces, a.split_dim),
            a.ident if KINDS[a.kind] == "ep" else None,
            a.ident if KINDS[a.kind] == "pp" else None,
        )
        for a in (header.axes if header.shard else ())
    )


def shard_shape(whole: Shape, split_dim: int, count: int) -> Shape:
    """The shape of each of `count` equal pieces. Raises Refusal if there are no such pieces."""
    if not 0 <= split_dim < len(whole):
        raise Refusal(f"no dimension {split_dim} in shape {list(whole)}")
    if not 0 < count <= MAX_PIECES or whole[split_dim] % count:
        raise Refusal(f"dimension {split_dim} of shape {list(whole)} cannot be split evenly by {count}")
    return (*whole[:split_dim], whole[split_dim] // count, *whole[split_dim + 1 :])


def tp_key(key: str, rank: int) -> str:
    return f"{key}_tp_{rank}"


def piece_key(key: str, spec: Spec) -> str:
    """Where the piece is stored. One tp axis alone has the short form that the `*_with_tp` calls use."""
    if len(spec) == 1 and spec[0].kind == TP:
        return tp_key(key, spec[0].rank)
    return key + "".join(f"__{_suffix(a)}" for a in canonical(spec))


def _suffix(axis: AxisSpec) -> str:
    named = (("sd", axis.split_dim if axis.split_dim >= 0 else None), ("eid", axis.expert), ("sid", axis.stage))
    return f"{KINDS[axis.kind]}_{axis.rank}of{axis.size}" + "".join(f"_{n}{v}" for n, v in named if v is not None)


def manifest_key(key: str) -> str:
    return f"{key}__parallelism_manifest"


def part_key(key: str, part: Partition) -> str:
    return f"{key}__writer_{part.rank}of{part.size}_sd{part.split_dim}"


def part_manifest_key(key: str) -> str:
    return f"{key}__writer_manifest"
