"""Bundles that are whole, verify, and do their work badly: what the gate is for."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moonpool.c2c.bundle import MANIFEST, SUMS, WEIGHTS, Bundle, open_bundle


def damage(
    bundle: Bundle, folder: Path, layer: int, share: float, seed: int = 0, *, keep_report: bool = False
) -> Bundle:
    """A copy of `bundle` in `folder` (not there yet) with `share` of the weights of one target layer set to 0, at random places.

    Without a report, or with the sound bundle's (`keep_report`), which then speaks of other weights. Raises ValueError if the
    bundle has no weights of such a layer.
    """
    folder.mkdir(parents=True)
    tensors = load_file(bundle.folder / WEIGHTS)
    hit = _weights_of(tensors, layer, bundle.manifest.target.num_layers)
    if not hit:
        raise ValueError(f"no weights of layer {layer} among {', '.join(sorted(tensors))}")
    generator = torch.Generator().manual_seed(seed)
    for weight in hit:
        weight.masked_fill_(torch.rand(weight.shape, generator=generator) < share, 0)
    save_file(tensors, folder / WEIGHTS)
    kept = bundle.sums.keys() if keep_report else {MANIFEST, WEIGHTS}
    for name in kept - {WEIGHTS}:
        shutil.copyfile(bundle.folder / name, folder / name)
    sums = [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in sorted(kept)]
    (folder / SUMS).write_text("".join(sums))
    return open_bundle(folder)


def _weights_of(tensors: dict[str, Tensor], layer: int, layers: int) -> list[Tensor]:
    """What only this target layer uses: tensors of its own, or its columns of a trunk's `up.weight`."""
    own = [t for n, t in tensors.items() if n.startswith(f"layers.{layer}.") and n.endswith("weight")]
    trunk = [t.view(len(t), layers, -1)[:, layer] for n, t in tensors.items() if n == "up.weight" and layer < layers]
    return own + trunk
