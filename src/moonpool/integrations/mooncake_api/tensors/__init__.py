"""The peer's tensor calls: the mixin `TensorMethods`, the classes that say how a tensor is split, and the codec.

`TensorMethods` only uses the raw calls that `RawStore` lists. torch is imported when a tensor call is made, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moonpool.integrations.mooncake_api.tensors import codec
from moonpool.integrations.mooncake_api.tensors.header import SIZE
from moonpool.integrations.mooncake_api.tensors.layout import ParallelAxis, ReadTarget, Refusal, TensorParallelism
from moonpool.integrations.mooncake_api.tensors.methods import BufferTensorMethods, PlainTensorMethods
from moonpool.integrations.mooncake_api.tensors.parallel_methods import ParallelTensorMethods
from moonpool.integrations.mooncake_api.tensors.raw import RawStore

if TYPE_CHECKING:
    import torch

__all__ = [
    "ParallelAxis",
    "RawStore",
    "ReadTarget",
    "TensorMethods",
    "TensorParallelism",
    "deserialize_tensor",
    "serialize_tensor",
    "tensor_metadata_size",
]


class TensorMethods(PlainTensorMethods, BufferTensorMethods, ParallelTensorMethods):
    """All of them."""


def serialize_tensor(tensor: torch.Tensor) -> tuple[bytes, int, int, torch.Tensor]:
    """Header, address and bytes of the data, and the tensor that owns it. Raises ValueError for what cannot be stored.

    The peer's `_serialize_tensor`. The owner is the tensor itself if that is contiguous, wherever it lives.
    """
    try:
        owner = codec.storable(tensor).contiguous()
    except Refusal as e:
        raise ValueError(f"unsupported tensor for Mooncake tensor serialization: {e}") from e
    header = codec.header_of(owner)
    return header.pack(), owner.data_ptr(), header.data_bytes, owner


def deserialize_tensor(payload: bytes) -> torch.Tensor:
    """The peer's `_deserialize_tensor`: a tensor of its own memory. Raises ValueError for bytes that are no tensor object."""
    if not isinstance(payload, bytes):
        raise TypeError(f"a payload must be bytes, not {type(payload).__name__}")
    tensor = codec.read(np.frombuffer(payload, np.uint8))
    if tensor is None:
        raise ValueError("invalid serialized Mooncake tensor payload")
    return tensor


def tensor_metadata_size() -> int:
    """The peer's `_tensor_metadata_size`: bytes of the header."""
    return SIZE
