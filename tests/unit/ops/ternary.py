"""A toy format in one file: weights of -1, 0 or 1 times one factor a row, five to a byte. See docs/extending.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.ops.formats import Format, Unit, Weight
from outrider.weights.quant_reader import QuantReader
from outrider.weights.quant_scheme import QuantScheme, Settings

POWERS = (1, 3, 9, 27, 81)


@dataclass(frozen=True)
class Ternary(Format):
    """Tensors: trits uint8 [N, K / 5], the first weight in the lowest place; scale float32 [N, 1]."""

    name = "ternary"
    units = {"trits": Unit(5), "scale": Unit(0, bytes=4)}  # noqa: RUF012

    def dequantise(self, weight: Weight) -> Tensor:
        trits = weight.tensors["trits"].int()
        digits = torch.stack([trits // power % 3 - 1 for power in POWERS], dim=-1)
        return digits.reshape(weight.shape).float() * weight.tensors["scale"]

    def quantise(self, values: Tensor) -> Weight:
        scale = values.float().abs().mean(-1, keepdim=True)
        digits = (values.float() / scale).round().clamp(-1, 1).int().add(1).view(*values.shape[:-1], -1, 5)
        trits = (digits * torch.tensor(POWERS, device=values.device)).sum(-1).to(torch.uint8)
        return Weight(self, tuple(values.shape), {"trits": trits, "scale": scale})


def read(where: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Weight:
    return Weight(Ternary(), shape, {"trits": tensors["trits"], "scale": tensors["scale"]})


# How our pretended container keeps such a matrix: `q_proj.trits` and `q_proj.scale`.
TERNARY = QuantReader("ternary", Ternary(), ("trits", "scale"), read)


def ternary(settings: Settings) -> QuantScheme:
    """The row of the table: which modules are ternary. Here every linear one but those that are left out by name."""
    left_out = settings.get("ignore", [])
    assert isinstance(left_out, list)
    return lambda module: TERNARY if ".layers." in module and module not in left_out else None
