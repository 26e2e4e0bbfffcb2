from moonpool.integrations.mooncake_api.buffers import BufferPool, RegisteredBufferPool

__all__ = ["BufferPool", "RegisteredBufferPool"]
