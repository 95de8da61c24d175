"""Dense matrices: a floating-point number for every weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Format, Unit, Weight


@dataclass(frozen=True)
class DenseFormat(Format):
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def units(self) -> Mapping[str, Unit]:
        return {"values": Unit(1, bytes=self.dtype.itemsize)}

    def dequantise(self, weight: Weight) -> Tensor:
        return weight.tensors["values"].float()

    def quantise(self, values: Tensor) -> Weight:
        return dense(values.to(self.dtype))


def dense(values: Tensor) -> Weight:
    return Weight(DenseFormat(values.dtype), tuple(values.shape), {"values": values})
