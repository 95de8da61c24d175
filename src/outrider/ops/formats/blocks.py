"""Converts weights to the GGUF blocks that the CPU kernels have.

The grouped integers of compressed-tensors, AWQ and GPTQ: symmetric ones become Q4_0 or Q8_0 and keep their values (a
scale outside float16's normal range is refused); 4-bit ones with zero-points become Q4_1, whose offset is rounded to
float16. GGUF's Q1_0 and Q2_0 become Q4_0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .base import Weight
from .gguf import GGUFBlockFormat, codes_of, scales_of
from .integer import IntegerFormat, halves

BLOCK = 32
# float16's normal range
SMALLEST = 6.2e-5
LARGEST = 6e4


class Widening(NamedTuple):
    """Code c of a narrow format is code first + c * distance of Q4_0."""

    first: int
    distance: int


WIDENINGS = {"Q1_0": Widening(7, 2), "Q2_0": Widening(7, 1)}  # -1 and 1; -1, 0, 1 and 2


def blocks_of(weight: Weight) -> Weight | None:
    """Rewrites a matrix as Q4_0, Q4_1 or Q8_0; None if it has no such form."""
    format = weight.format
    if format.name in WIDENINGS:
        return _widened(weight)
    t = weight.tensors
    columns = weight.shape[-1]
    if not isinstance(format, IntegerFormat) or format.ordered or columns % BLOCK or format.group % BLOCK:
        return None
    if format.has_zero_point and format.bits == 8:
        return None
    scale = t["scale"].float()
    if bool(((scale.abs() < SMALLEST) | (scale.abs() > LARGEST)).any()):
        return None
    each = (format.group or columns) // BLOCK
    d = spread(scale, each).to(torch.float16)
    if format.bits == 8:
        return made("Q8_0", weight.shape, numbers=[d], codes=(t["q"] ^ 128).unflatten(-1, (-1, BLOCK)))
    q = halves(t["q"]).unflatten(-1, (-1, BLOCK))
    nibbles = q[..., :16] | (q[..., 16:] << 4)  # a block's first half in the low halves
    if not format.has_zero_point:
        return made("Q4_0", weight.shape, numbers=[d], codes=nibbles)
    return made(
        "Q4_1", weight.shape, numbers=[d, spread(-scale * t["zero"].float(), each).to(torch.float16)], codes=nibbles
    )


def _widened(weight: Weight) -> Weight:
    """Codes of one or two bits as Q4_0, with the same values."""
    kind = weight.format.name
    rows = weight.tensors["blocks"].flatten(0, -2)
    widening = WIDENINGS[kind]
    q = (codes_of(kind, rows) * widening.distance + widening.first).unflatten(-1, (-1, BLOCK))
    scale = scales_of(kind, rows)[0].to(torch.float16)
    d = spread(scale, weight.shape[-1] // BLOCK // scale.shape[-1])
    blocks = made("Q4_0", weight.shape, numbers=[d], codes=q[..., :16] | (q[..., 16:] << 4)).tensors["blocks"]
    return Weight(GGUFBlockFormat("Q4_0"), weight.shape, {"blocks": blocks.view(*weight.shape[:-1], -1)})


def spread(numbers: Tensor, each: int) -> Tensor:
    """[.., groups] -> [.., blocks, 1]"""
    return numbers.repeat_interleave(each, dim=-1)[..., None]


def made(kind: str, shape: tuple[int, ...], numbers: list[Tensor], codes: Tensor) -> Weight:
    """Blocks from float16 numbers [.., blocks, 1] and codes [.., blocks, bytes]."""
    blocks = torch.cat([*(n.contiguous().view(torch.uint8) for n in numbers), codes.view(torch.uint8)], dim=-1)
    return Weight(GGUFBlockFormat(kind), shape, {"blocks": blocks.flatten(-2).contiguous()})
