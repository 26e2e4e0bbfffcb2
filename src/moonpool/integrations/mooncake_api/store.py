"""The store with all its calls, put together from what each module does."""

from __future__ import annotations

from moonpool.integrations.mooncake_api.manage import Manage
from moonpool.integrations.mooncake_api.ranges import RangedGets
from moonpool.integrations.mooncake_api.segments import Segments
from moonpool.integrations.mooncake_api.sessions import Sessions
from moonpool.integrations.mooncake_api.tensors import TensorMethods


class MooncakeDistributedStore(TensorMethods, Sessions, RangedGets, Manage, Segments):
    """See the modules for the calls: `life` (set up, close, memory), `data`, `ranges`, `sessions`, `manage`, `segments`,
    `tensors`. Safe to use from several threads."""
