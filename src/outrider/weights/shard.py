"""One rank's shard of a checkpoint for tensor parallelism: of each source tensor, only the rows or columns that
`models.split` gives this rank are read.

Rows are a range of the file; columns are stripes of it. Both are views until they are copied into place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.names import TensorPlan
from ..models.split import Shard
from ..ops.formats import Weight, dense
from ..ops.formats.base import bits
from ..types import OutriderError
from .source_tensor import SourceTensor


def shard_of(piece: SourceTensor, cut: Shard, where: str) -> Weight:
    """A process's shard of a source tensor. where: names it in errors."""
    try:
        return shard_weight(piece.read(), cut)
    except OutriderError as error:
        raise OutriderError(f"{where}: {error}; leave out --tensor-parallel, or take another number") from None


def shard_weight(weight: Weight, cut: Shard) -> Weight:
    """The shard's columns, or rows (of each expert)."""
    if cut.columns:
        ((lo, hi),) = cut.spans
        return weight.columns(lo, hi)
    units, tensors = weight.format.units, dict[str, Tensor]()
    for name, t in weight.tensors.items():
        parts = [bits(t)[..., lo:hi, :] if t.dim() > 1 else t[lo:hi] for lo, hi in cut.spans]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2 if t.dim() > 1 else 0)
        tensors[name] = t if units[name].shared else joined.view(t.dtype)
    at = max(0, len(weight.shape) - 2)
    return Weight(
        weight.format, (*weight.shape[:at], sum(hi - lo for lo, hi in cut.spans), *weight.shape[at + 1 :]), tensors
    )


def shard_tensor(whole: Tensor, plan: TensorPlan, cuts: Sequence[Shard]) -> Tensor:
    """The shard of a tensor in memory (dummy weights)."""
    sources = whole.split([shape[0] for shape in plan.source_shapes])
    return torch.cat([shard_weight(dense(each), cut).tensors["values"] for each, cut in zip(sources, cuts)])
