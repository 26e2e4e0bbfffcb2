"""The pool on an existing engine: a cluster that runs Mooncake Store (RDMA and all) gets Moonpool's interface and conversion.

    reserve ─► space in the slab ─► commit: batch_put_from ──►┐
                                                             ├─ mooncake.store (the real one), its master and segments
    open_read ─► batch_get_into ─► space in the slab ◄────────┘

The slab is one block of this process that is registered with the peer, so that its engine reads and writes it without a copy.
What the peer cannot do is listed in `limits` and told by `Unsupported`; `docs/existing-engine.md` has the tables.
"""

from moonpool.store.mooncake.config import MooncakeConfig
from moonpool.store.mooncake.pool import MooncakePool

__all__ = ["MooncakeConfig", "MooncakePool"]
