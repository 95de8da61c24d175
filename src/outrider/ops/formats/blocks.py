"""Converts the grouped integers of compressed-tensors, AWQ and GPTQ checkpoints to GGUF blocks, for the CPU kernels.

Symmetric ones become Q4_0 or Q8_0 and keep their values (a scale outside float16's normal range is refused); 4-bit ones
with zero-points become Q4_1, whose offset is rounded to float16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Weight
from .gguf import GGUFBlockFormat
from .integer import IntegerFormat, halves

BLOCK = 32
# float16's normal range
SMALLEST = 6.2e-5
LARGEST = 6e4


def blocks_of(weight: Weight) -> Weight | None:
    """Rewrites a matrix as Q4_0, Q4_1 or Q8_0; None if it has no such form."""
    format = weight.format
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


def spread(numbers: Tensor, each: int) -> Tensor:
    """[.., groups] -> [.., blocks, 1]"""
    return numbers.repeat_interleave(each, dim=-1)[..., None]


def made(kind: str, shape: tuple[int, ...], numbers: list[Tensor], codes: Tensor) -> Weight:
    """Blocks from float16 numbers [.., blocks, 1] and codes [.., blocks, bytes]."""
    blocks = torch.cat([*(n.contiguous().view(torch.uint8) for n in numbers), codes.view(torch.uint8)], dim=-1)
    return Weight(GGUFBlockFormat(kind), shape, {"blocks": blocks.flatten(-2).contiguous()})
