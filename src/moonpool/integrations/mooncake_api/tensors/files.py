"""Tensors to and from safetensors files."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from moonpool.integrations.mooncake_api.tensors.raw import refuse

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

NO_SUCH_TENSOR = -1100
"""The peer's FILE_NOT_FOUND."""


def save(key: str, tensor: torch.Tensor, file_name: str) -> int:
    """0, or -600 (and the reason in the log) if the file cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({key: tensor.contiguous()}, file_name)
    except (OSError, SafetensorError) as e:
        return refuse(f"cannot write {file_name}: {e}", key)
    return 0


def load(key: str | None, file_name: str) -> torch.Tensor | None:
    """The tensor named `key`, else the first of the file; None (and the reason in the log) if there is none.

    Only that tensor is read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file_name, framework="pt") as file:
            names = list(file.keys())
            if not names:
                refuse(f"{file_name} has no tensors")
                return None
            if key is not None and key not in names:
                log.warning("%s has no tensor %s; taking its first, %s", file_name, key, names[0])
            tensor: torch.Tensor = file.get_tensor(key if key in names else names[0])
    except (OSError, SafetensorError) as e:
        refuse(f"cannot read {file_name}: {e}")
        return None
    return tensor
