"""Several processes of one training, started by `torchrun`: each takes its share of every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")
_PATIENCE = timedelta(hours=2)
"""For a process that captures more documents than the others."""


@dataclass(frozen=True, slots=True)
class World:
    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """This process writes."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        return items[self.rank :: self.size]

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module, its gradients averaged over the processes."""
        return DistributedDataParallel(module) if self.size > 1 else module

    def total(self, values: Tensor) -> Tensor:
        """The sum over the processes."""
        if self.size > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values.cpu()

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            dist.barrier()


def silent(module: nn.Module) -> AbstractContextManager[Any]:
    """While open, backward passes only add to this process's gradients."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


@contextmanager
def open_world(device: str) -> Iterator[World]:
    """The processes that torchrun started with this one; alone where it did not."""
    if not dist.is_torchelastic_launched():
        yield World(torch.device(device))
        return
    at = torch.device(f"cuda:{dist.get_node_local_rank()}" if device == "cuda" else device)
    if at.type == "cuda":
        torch.cuda.set_device(at)
    dist.init_process_group("nccl" if at.type == "cuda" else "gloo", timeout=_PATIENCE)
    try:
        yield World(at, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
