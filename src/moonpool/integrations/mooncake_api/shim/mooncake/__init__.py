"""Found as `mooncake` when Moonpool answers for it (see `moonpool.integrations.mooncake_api`)."""

from moonpool.integrations.mooncake_api.buffers import BufferPool, RegisteredBufferPool

__all__ = ["BufferPool", "RegisteredBufferPool"]
