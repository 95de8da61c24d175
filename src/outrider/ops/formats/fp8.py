"""FP8 (e4m3) with one scale per row, or per 128 columns of a row.

Tensors: q float8_e4m3fn [N, K]; scale float32 [N, 1] or [N, K / group]. A scale of the whole tensor, or of a block of
rows, is expanded to rows when it is read: weight[n, k] = q[n, k] * scale[n, k // group].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Format, Unit, Weight

LARGEST = 448.0


@dataclass(frozen=True)
class Float8Format(Format):
    group: int = 0  # columns that share a factor; 0: the whole row

    @property
    def name(self) -> str:
        return f"fp8 g{self.group}" if self.group else "fp8"

    @property
    def units(self) -> Mapping[str, Unit]:
        return {"q": Unit(1), "scale": Unit(self.group, bytes=4)}

    def dequantise(self, weight: Weight) -> Tensor:
        scale = weight.tensors["scale"]
        groups = weight.tensors["q"].float().reshape(*weight.shape[:-1], scale.shape[-1], -1)
        return (groups * scale[..., None]).reshape(weight.shape)

    def quantise(self, values: Tensor) -> Weight:
        *rows, columns = values.shape
        groups = values.float().reshape(*rows, -1, self.group or columns)
        scale = (groups.abs().amax(-1) / LARGEST).clamp_min(1e-12)
        q = (groups / scale[..., None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).reshape(values.shape)
        return Weight(self, tuple(values.shape), {"q": q, "scale": scale})
