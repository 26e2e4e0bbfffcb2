"""What decides a distillation besides projector, models and lessons."""

from __future__ import annotations

from typing import Literal

import msgspec
import torch


class DistilOptions(msgspec.Struct, frozen=True, kw_only=True):
    steps: int = 400
    batch: int = 4
    """Lessons of one step, in each process."""
    at_once: int = 0
    """Lessons that go through the target together; 0 = all of the batch."""
    prefix_range: tuple[int, int] = (96, 448)
    """Shortest and longest prefix of a lesson that may be cut anywhere, tokens."""
    continuation: int = 48
    """Tokens that the target is asked about."""
    held_continuation: int = 96
    """The same for held-out lessons."""
    tail: int = 0
    """Last tokens of the prefix that the target computes itself over the mapped cache, as a rule with such a tail does."""
    native_tokens: int = 16
    """Tokens at the start that stay native, as the first page does when serving."""
    parametrisation: Literal["full", "lowrank"] = "full"
    """full: the weights themselves are trained; lowrank: a correction A · B of each matrix, merged at the end."""
    rank: int = 32
    """Of that correction."""
    learning_rate: float = 2.5e-4
    """In RMS of each tensor, per step. At 3e-3 a trial diverged."""
    warm_up: int = 10
    """Steps to the full rate; half a cosine follows."""
    beta2: float = 0.999
    clip: float = 1.0
    """Largest norm of a step's gradient."""
    position_weight: float = 0.0
    """Weight of the i-th token behind the prefix: `exp(-position_weight · i)`, brought to a mean of 1 in each lesson. 0: all alike.
    Held-out KL is never weighted."""
    mix: dict[str, float] = {}
    """How often a kind of lesson comes; 1 for kinds that are not named."""
    every: int = 50
    """Steps between two looks at the held-out lessons."""
    checkpoint_every: int = 0
    """Steps between two saves besides those at each look; 0 = none."""
    resume: bool = True
    """Go on where a training with the same arguments was saved last; else its state is dropped."""
    patience: int = 6
    """Looks in a row without a better held-out KL that end the training."""
    seed: int = 0
    device: str = "cpu"
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the target and the maps' products; weights, moments, rotation and softmax are fp32. auto: bf16 on a GPU and on a CPU with
    bf16 matrix units."""
    checkpointing: bool = False
    """Compute the target's activations twice instead of keeping them."""
    plot: bool = False
    """Draw metrics.png (needs matplotlib)."""

    @property
    def correction(self) -> int:
        """Rank of what is trained beside frozen weights; 0 = nothing is frozen."""
        return self.rank if self.parametrisation == "lowrank" else 0

    def dtype(self) -> torch.dtype:
        if self.compute == "auto":
            fast = self.device != "cpu" or torch.cpu._is_amx_tile_supported()
            return torch.bfloat16 if fast else torch.float32
        return torch.bfloat16 if self.compute == "bfloat16" else torch.float32
