"""Projector kinds behind one interface (`base.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor

from moonpool.c2c.projectors.base import Projector, Stored
from moonpool.c2c.projectors.coded import CodedProjector
from moonpool.c2c.projectors.fuse import Fuser
from moonpool.c2c.projectors.headlocal import HeadLocalProjector
from moonpool.c2c.projectors.identity import IdentityProjector
from moonpool.c2c.projectors.linear import LinearProjector
from moonpool.c2c.projectors.lookback import LookBackProjector
from moonpool.c2c.projectors.mlp import MlpProjector
from moonpool.c2c.projectors.stored import as_read
from moonpool.c2c.projectors.trunk import TrunkProjector
from moonpool.errors import BundleCorrupt, ConversionRefused

S = TypeVar("S", bound=Stored)

_KINDS: dict[str, type[Stored]] = {
    c.kind: c
    for c in (
        IdentityProjector,
        LinearProjector,
        HeadLocalProjector,
        TrunkProjector,
        CodedProjector,
        LookBackProjector,
        MlpProjector,
        Fuser,
    )
}


def kind_of(name: str) -> type[Stored]:
    """The class of a manifest's `kind`. Raises BundleCorrupt."""
    if name not in _KINDS:
        raise BundleCorrupt("unknown projector kind", key=name, need=", ".join(sorted(_KINDS)))
    return _KINDS[name]


def projector_kind(name: str) -> type[Projector]:
    """The same for a rule that converts. Raises BundleCorrupt, ConversionRefused (the kind needs the target's own cache)."""
    found = kind_of(name)
    if not issubclass(found, Projector):
        raise ConversionRefused(
            "it cannot stand in for the target's prefill: half of its first matrix multiplies the target's own cache, and its "
            "result is added to that cache (a published source-only variant answers below chance)",
            key=f"kind {name}",
            fix="Use it in a rule with `mode: fuse`.",
        )
    return found


def fuser_kind(name: str) -> type[Fuser]:
    """The same for a rule that fuses. Raises BundleCorrupt, ConversionRefused (the kind reads the source alone)."""
    found = kind_of(name)
    if not issubclass(found, Fuser):
        raise ConversionRefused(
            "it makes the target's pages from the source's alone and has nothing to add to a cache that the target has made",
            key=f"kind {name}",
            need=f"kind {Fuser.kind}",
            fix="Use it in a rule with `mode: on_put`, `on_miss`, `hint` or `on_load`.",
        )
    return found


def build(kind: type[S], parameters: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> S:
    """From a manifest's parameters and a bundle's weights. Raises BundleCorrupt."""
    tensors = as_read(tensors)
    built = kind.build(parameters, tensors)
    if foreign := sorted(tensors.keys() - built.tensors().keys()):
        raise BundleCorrupt("weights that this kind does not have", key=kind.kind, have=", ".join(foreign[:8]))
    return built


def build_projector(kind: str, parameters: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Projector:
    """A projector by the name of its kind. Raises BundleCorrupt, ConversionRefused."""
    return build(projector_kind(kind), parameters, tensors)
