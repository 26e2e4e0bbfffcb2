"""Drop-in for the `mooncake` package: the same names, argument order and return codes, answered by Moonpool's pool.

python -m moonpool.integrations.mooncake_api PROGRAM ARGS...   runs an unmodified program on it (see `docs/mooncake-api.md`)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonpool.integrations.mooncake_api.replicate import ReplicateConfig as ReplicateConfig
    from moonpool.integrations.mooncake_api.store import MooncakeDistributedStore as MooncakeDistributedStore

_HOMES = {"MooncakeDistributedStore": "store", "ReplicateConfig": "replicate"}

__all__ = ["MooncakeDistributedStore", "ReplicateConfig"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
