"""Weights as a bundle will hold them, with the offset that rounding them leaves taken into the bias.

Some features of a source's KV have means of a hundred deviations. Rounded weights turn such a mean into an offset of every token,
far above what rounding does to the rest: on the Qwen pair an offset of half a key's deviation at 8 bits (experiments/LOG.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moonpool.c2c.fitting.capture import CaptureStore
from moonpool.c2c.fitting.features import rows
from moonpool.c2c.projectors import build_projector
from moonpool.c2c.projectors.base import Projector
from moonpool.c2c.projectors.stored import as_read, as_stored

_DOCUMENTS = 32


def mean_token(projector: Projector, source: CaptureStore, documents: Sequence[Tensor]) -> Tensor:
    """Mean of a token's KV as the projector reads it, over some of the documents, position 0 left out: fp32 `[source layers, 2,
    width]`."""
    rope = source.spec.rope if projector.key_space == "content" else None
    chosen = documents[:: max(1, len(documents) // _DOCUMENTS)][:_DOCUMENTS]
    means = [rows(source.get(d), rope)[1:].to(torch.float64).mean(0) for d in chosen]
    return torch.stack(means).mean(0).float()


@torch.no_grad()
def settled(projector: Projector, mean: Tensor, dtype: torch.dtype) -> Projector:
    """The projector with its weights as `dtype` (int8 or a float type) holds them, giving for the mean token `mean` fp32
    `[source layers, 2, width]` what it gives now. A kind without a bias beside its last product is only rounded."""
    rounded = build_projector(projector.kind, projector.parameters(), _kept(projector, dtype))
    if "bias" not in projector.tensors():
        return rounded
    offset = _of_mean(rounded, mean) - _of_mean(projector, mean)
    tensors = {**rounded.tensors(), "bias": rounded.tensors()["bias"] - offset}
    return build_projector(projector.kind, projector.parameters(), tensors)


def _kept(projector: Projector, dtype: torch.dtype) -> dict[str, Tensor]:
    stored = as_stored(projector.tensors(), dtype)
    return {n: t.to(torch.float32) for n, t in as_read(stored).items()}


def _of_mean(projector: Projector, mean: Tensor) -> Tensor:
    """What it makes of the mean token, before a key shell: `[target layers, 2, width]`."""
    flat = {**projector.parameters(), **({"shell_dim": 0} if "shell_dim" in projector.parameters() else {})}
    plain = build_projector(projector.kind, flat, {n: t for n, t in projector.tensors().items() if n != "shell"})
    return plain.project(mean.expand(max(1, projector.page_size), *mean.shape))[-1]


def for_storage(
    projector: Projector, source: CaptureStore, documents: Sequence[Tensor], dtype: torch.dtype
) -> Projector:
    """`settled` for a bundle in `dtype`, by these documents' mean token. What is judged is this projector."""
    return settled(projector, mean_token(projector, source, documents), dtype)
