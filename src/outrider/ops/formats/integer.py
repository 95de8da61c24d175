"""Integers of 4 or 8 bits with one scale per group of columns, as compressed-tensors, AWQ and GPTQ have them.

    weight[n, order[j]] = (q[n, j] - zero[n, j // group]) * scale[n, j // group]

Tensors: q uint8 [N, K] or, in 4 bits, [N, K / 2] with the even column in the low half; scale [N, K / group]; zero
uint8, if the integers are not symmetric about 2^(bits - 1); order int32 [K], if the columns are stored in another order
than the input has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Format, Unit, Weight


@dataclass(frozen=True)
class IntegerFormat(Format):
    bits: int  # 4 or 8
    group: int  # columns that share a factor; 0: the whole row
    has_zero_point: bool = False  # has a tensor of zero-points
    ordered: bool = False  # has an order of columns
    scale: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        group = f"g{self.group}" if self.group else "channel"
        return f"int{self.bits} {group}" + " asymmetric" * self.has_zero_point + " ordered" * self.ordered

    @property
    def units(self) -> Mapping[str, Unit]:
        units = {"q": Unit(8 // self.bits), "scale": Unit(self.group, bytes=self.scale.itemsize)}
        if self.has_zero_point:
            units["zero"] = Unit(self.group)
        if self.ordered:
            units["order"] = Unit(1, bytes=4, shared=True)
        return units

    def dequantise(self, weight: Weight) -> Tensor:
        q = weight.tensors["q"]
        scale = weight.tensors["scale"].float()
        values = halves(q) if self.bits == 4 else q
        groups = values.reshape(*weight.shape[:-1], scale.shape[-1], -1).float()  # [.., N, groups, group]
        zero = weight.tensors["zero"].float()[..., None] if self.has_zero_point else float(1 << (self.bits - 1))
        dense = ((groups - zero) * scale[..., None]).reshape(weight.shape)
        if not self.ordered:
            return dense
        out = torch.empty_like(dense)
        out[..., weight.tensors["order"].long()] = dense
        return out

    def quantise(self, values: Tensor) -> Weight:
        """Scales by the largest magnitude of a group; symmetric, columns in their own order."""
        format = IntegerFormat(self.bits, self.group, scale=self.scale)
        *rows, columns = values.shape
        groups = values.float().reshape(*rows, -1, self.group or columns)
        top = float(1 << (self.bits - 1))
        scale = (groups.abs().amax(-1) / (top - 0.5)).clamp_min(1e-8).to(self.scale)
        q = (groups / scale.float()[..., None]).round_().clamp_(-top, top - 1).add_(top)
        q = q.to(torch.uint8).reshape(values.shape)
        return Weight(format, tuple(values.shape), {"q": pairs(q) if self.bits == 4 else q, "scale": scale})


def halves(q: Tensor) -> Tensor:
    """uint8 [.., K / 2] -> [.., K]: the low half of a byte is the even column."""
    return torch.stack((q & 15, q >> 4), dim=-1).flatten(-2)


def pairs(q: Tensor) -> Tensor:
    """The inverse of `halves`."""
    return q[..., 0::2] | (q[..., 1::2] << 4)
