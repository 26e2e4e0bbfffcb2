"""Tensors ↔ bytes. The only module here that touches torch, and only when it is called: who stores no tensor never pays for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moonpool.integrations.mooncake_api.tensors.header import DTYPES, MAX_DIMS, Axis, Bytes, Header, Shape, parse
from moonpool.integrations.mooncake_api.tensors.layout import Refusal

if TYPE_CHECKING:
    import torch

_CODES = {f"torch.{name}": code for code, (name, _) in enumerate(DTYPES)}


def storable(value: object) -> torch.Tensor:
    """The value if it is a tensor that has a place in the format. Raises Refusal."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise Refusal(f"not a tensor but {type(value).__name__}")
    if value.layout is not torch.strided or value.device.type == "meta" or value.is_quantized:
        raise Refusal(f"a {value.layout} tensor on {value.device} has no plain data")
    if str(value.dtype) not in _CODES:
        raise Refusal(f"{value.dtype} has no code in the format")
    if value.dim() > MAX_DIMS:
        raise Refusal(f"{value.dim()} dimensions; the format has {MAX_DIMS}")
    return value.detach()


def code_of(tensor: torch.Tensor) -> int:
    """The dtype's code in the format."""
    return _CODES[str(tensor.dtype)]


def encode(tensor: torch.Tensor, *, whole: Shape | None = None, axes: tuple[Axis, ...] = ()) -> tuple[Bytes, Bytes]:
    """Header and data of a `storable` tensor. The data is the tensor's own memory where it is contiguous and on the CPU.

    `whole` and `axes` say of which tensor it is which piece.
    """
    header = header_of(tensor, whole=whole, axes=axes)
    return np.frombuffer(header.pack(), np.uint8), data_of(tensor.resolve_neg().contiguous().cpu())


def header_of(tensor: torch.Tensor, *, whole: Shape | None = None, axes: tuple[Axis, ...] = ()) -> Header:
    shape = tuple(tensor.shape)
    return Header(code_of(tensor), shape, shape if whole is None else whole, axes, bool(axes))


def data_of(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous CPU tensor, whose dtype numpy need not know."""
    import torch

    flat = tensor.as_strided(
        (tensor.numel(),), (1,)
    )  # one element is contiguous whatever its stride, a view is not so lenient
    return np.asarray(flat.view(torch.uint8).numpy())


def decode(data: Bytes, header: Header) -> torch.Tensor:
    """The tensor in an object whose header `parse` has accepted. It shares `data` if that is writable, else it is a copy."""
    import torch

    dtype = getattr(torch, DTYPES[header.dtype][0])
    if header.data_bytes == 0:
        return torch.empty(header.shape, dtype=dtype)
    if not data.flags.writeable:
        data = data.copy()
    return torch.frombuffer(data, dtype=torch.uint8, offset=header.data_offset).view(dtype).reshape(header.shape)


def read(data: Bytes | None) -> torch.Tensor | None:
    """The tensor that an object is, or None if it is missing or none."""
    header = None if data is None else parse(data)
    return None if data is None or header is None else decode(data, header)


def copy_to(data: Bytes, header: Header, target: object) -> int:
    """Copies the tensor into `target`, which may be on a GPU and must have its dtype and shape; the bytes copied.

    Raises Refusal if it is of another kind, or not contiguous.
    """
    tensor = storable(target)
    if (code_of(tensor), tuple(tensor.shape)) != (header.dtype, header.shape) or not tensor.is_contiguous():
        raise Refusal(f"the target must be a contiguous {DTYPES[header.dtype][0]} of shape {list(header.shape)}")
    if tensor.device.type != "cuda":
        raise Refusal(f"the target is on {tensor.device}, not on a CUDA device")
    tensor.copy_(decode(data, header))
    return header.data_bytes
