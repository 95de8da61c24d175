"""Data parallelism under `torchrun`: rank, world size, and the few collectives that training needs.

The drafter is small, so every process holds all of it and takes its own share of the batches; gradients are averaged.
Decisions that would differ between processes (clocks, evaluations) are rank 0's. Without torchrun everything is a
no-op.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class TrainGroup:
    rank: int = 0
    world: int = 1
    device: str = "cpu"

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mean_(self, tensors: Iterable[Tensor]) -> None:
        """Averages over the processes, in place; one message for all tensors."""
        if self.world == 1:
            return
        listed = list(tensors)
        flat = torch.cat([t.reshape(-1).float() for t in listed])
        dist.all_reduce(flat)
        flat /= self.world
        for tensor, piece in zip(listed, flat.split([t.numel() for t in listed]), strict=True):
            tensor.copy_(piece.view_as(tensor))

    def agree(self, value: float) -> float:
        """Rank 0's value."""
        if self.world == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return float(shared)

    def any(self, mine: bool) -> bool:
        """Whether it holds in any process."""
        if self.world == 1:
            return mine
        shared = torch.tensor([float(mine)], device=self.device)
        dist.all_reduce(shared)
        return bool(shared > 0)

    def share_(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's contents, in place."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()


@contextmanager
def process_group(device: str) -> Iterator[TrainGroup]:
    """The group that torchrun's environment describes; on GPUs each process takes the one of its local rank."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield TrainGroup(device=device)
        return
    rank, cuda = int(os.environ["RANK"]), device.startswith("cuda")
    place = f"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}" if cuda else device
    if cuda:
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world)
    try:
        yield TrainGroup(rank, world, place)
    finally:
        dist.destroy_process_group()
