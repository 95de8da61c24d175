"""Sharded target weights: every matrix of its layers is divided over the processes and gathered when it is used.

Training is data-parallel, so every process runs the whole target on its own batches. The target is frozen, so between
two uses a process keeps only its own shard. All processes must therefore run the target together, pass by pass,
evaluations included. Embedding and head stay whole: losses and clusters read them at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..ops.formats import DeviceWeight
from ..ops.reference import as_tensor
from .parallel import TrainGroup

DIVIDED = ("qkv", "out", "gate_up", "down", "experts_gate_up", "experts_down")


@dataclass(frozen=True)
class ShardedWeight:
    """One process's piece of a matrix: of its numbers in order, the rank-th of `world` equal parts."""

    mine: Tensor  # [ceil(numbers / world)]
    shape: tuple[int, ...]
    group: TrainGroup

    @staticmethod
    def of(whole: Tensor, group: TrainGroup) -> ShardedWeight:
        each = -(-whole.numel() // group.world)
        piece = whole.reshape(-1)[group.rank * each : (group.rank + 1) * each]
        mine = piece.new_zeros(each)
        mine[: piece.numel()] = piece
        return ShardedWeight(mine, tuple(whole.shape), group)

    @property
    def nbytes(self) -> int:
        return self.mine.nbytes

    def view(self, *shape: int) -> ShardedWeight:
        return ShardedWeight(self.mine, shape, self.group)

    def whole(self) -> Tensor:
        """A collective: all ranks call it together."""
        return self.group.gather(self.mine)[: prod(self.shape)].view(self.shape)


def divide(group: TrainGroup, name: str, weight: DeviceWeight) -> DeviceWeight:
    """A process's shard of a weight, when it is loaded."""
    matrix = name.startswith("layers.") and name.rpartition(".")[2] in DIVIDED
    return ShardedWeight.of(weight, group) if matrix and isinstance(weight, torch.Tensor) else weight


def dense(weight: DeviceWeight) -> Tensor:
    """The whole matrix, gathered if it is sharded."""
    return weight.whole() if isinstance(weight, ShardedWeight) else as_tensor(weight)
