"""Projector kinds behind one interface (`base.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moonpool.c2c.projectors.base import Projector
from moonpool.c2c.projectors.identity import IdentityProjector
from moonpool.c2c.projectors.linear import LinearProjector
from moonpool.c2c.projectors.mlp import MlpProjector
from moonpool.errors import BundleCorrupt

_KINDS: dict[str, type[Projector]] = {c.kind: c for c in (IdentityProjector, LinearProjector, MlpProjector)}


def build_projector(kind: str, parameters: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Projector:
    """A projector from a bundle's manifest and weights. Raises BundleCorrupt."""
    if kind not in _KINDS:
        raise BundleCorrupt("unknown projector kind", key=kind, need=", ".join(sorted(_KINDS)))
    built = _KINDS[kind].build(parameters, tensors)
    if foreign := sorted(tensors.keys() - built.tensors().keys()):
        raise BundleCorrupt("weights that this kind does not have", key=kind, have=", ".join(foreign[:8]))
    return built
