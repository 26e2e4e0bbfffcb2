from moonpool.integrations.mooncake_api.config import (
    DEFAULT_GLOBAL_SEGMENT_SIZE,
    DEFAULT_LOCAL_BUFFER_SIZE,
    MooncakeConfig,
    _parse_bool,
    _parse_segment_size,
)
from moonpool.integrations.mooncake_api.config import (
    log as logger,
)

__all__ = [
    "DEFAULT_GLOBAL_SEGMENT_SIZE",
    "DEFAULT_LOCAL_BUFFER_SIZE",
    "MooncakeConfig",
    "_parse_bool",
    "_parse_segment_size",
    "logger",
]
