"""Reads one `.pt` file of a published C2C checkpoint. The only place in Moonpool that opens a pickle.

The file is read once, when it is imported, by torch's restricted reader (`weights_only=True`): it builds tensors and plain
containers and refuses everything else, so nothing in the file is ever called. What comes out is checked by `c2c.official` and
kept as safetensors; no server ever sees the `.pt`.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from moonpool.errors import BundleCorrupt

MAX_FILE_BYTES = 8 << 30


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Name → tensor, mapped from the file, not read. Raises BundleCorrupt: no file, another format, anything but tensors."""
    key = str(path)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BundleCorrupt("file too large", key=key, need=f"<= {MAX_FILE_BYTES} B")
        if not zipfile.is_zipfile(path):
            raise BundleCorrupt(
                "not a torch file", key=key, need="the zip format of `torch.save`", fix="Fetch it again."
            )
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as e:
        raise BundleCorrupt("cannot read the weights", key=key, have=e.strerror or str(e)) from e
    except UnpicklingError as e:
        why = str(e).strip().splitlines()[-1]
        raise BundleCorrupt(f"holds something else than weights: {why}", key=key, fix="Do not trust this file.") from e
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, EOFError) as e:
        raise BundleCorrupt(f"damaged: {e}", key=key, fix="Fetch it again.") from e
    if not isinstance(found, dict) or not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in found.items()):
        raise BundleCorrupt("not a state dict", key=key, need="tensors by name", have=type(found).__name__)
    return dict(found)
