"""Moonpool: one pool of KV caches, shared by engines, machines and models.

Names are loaded when they are first used, so that `import moonpool` costs nothing and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonpool.errors import MoonpoolError as MoonpoolError
    from moonpool.keys import KVIdentity as KVIdentity
    from moonpool.keys import PageKey as PageKey
    from moonpool.pool import Pool as Pool
    from moonpool.store.base import KVPool as KVPool
    from moonpool.store.client import PoolClient as PoolClient

__version__ = "0.1.0"

_HOMES = {
    "KVIdentity": "moonpool.keys",
    "KVPool": "moonpool.store.base",
    "MoonpoolError": "moonpool.errors",
    "PageKey": "moonpool.keys",
    "Pool": "moonpool.pool",
    "PoolClient": "moonpool.store.client",
}

__all__ = ["KVIdentity", "KVPool", "MoonpoolError", "PageKey", "Pool", "PoolClient", "__version__"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'moonpool' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
