from moonpool.integrations.mooncake_api.buffers import (
    BufferHandle,
    BufferLease,
    BufferLeaseView,
    BufferPool,
    RegisteredBufferLease,
    RegisteredBufferLeaseView,
    RegisteredBufferPool,
)
from moonpool.integrations.mooncake_api.descriptors import (
    Descriptor,
    DiskDescriptor,
    MemoryDescriptor,
    QueryTaskResponse,
    ReplicaDescriptor,
    ReplicaStatus,
    TaskStatus,
    TaskType,
)
from moonpool.integrations.mooncake_api.memory import MooncakeHostMemAllocator, bind_to_numa_node
from moonpool.integrations.mooncake_api.replicate import ObjectDataType, ReplicateConfig, SoftPinAction
from moonpool.integrations.mooncake_api.store import MooncakeDistributedStore
from moonpool.integrations.mooncake_api.tensors import ParallelAxis, ReadTarget, TensorParallelism
from moonpool.integrations.mooncake_api.tensors import deserialize_tensor as _deserialize_tensor
from moonpool.integrations.mooncake_api.tensors import serialize_tensor as _serialize_tensor
from moonpool.integrations.mooncake_api.tensors import tensor_metadata_size as _tensor_metadata_size

for _kind in (ObjectDataType, ReplicaStatus, TaskType, TaskStatus):
    globals().update(_kind.__members__)  # the peer exports its enums' values here too: KVCACHE, COMPLETE, SUCCESS

__all__ = [
    "BufferHandle",
    "BufferLease",
    "BufferLeaseView",
    "BufferPool",
    "Descriptor",
    "DiskDescriptor",
    "MemoryDescriptor",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ParallelAxis",
    "QueryTaskResponse",
    "ReadTarget",
    "RegisteredBufferLease",
    "RegisteredBufferLeaseView",
    "RegisteredBufferPool",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "TaskStatus",
    "TaskType",
    "TensorParallelism",
    "_deserialize_tensor",
    "_serialize_tensor",
    "_tensor_metadata_size",
    "bind_to_numa_node",
]
