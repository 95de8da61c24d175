"""Rotary embedding for training, as one kernel forward and one backward.

In plain torch a rotation is eight passes over float32 copies; with six drafter layers, five unrolled steps and thirty
target layers that is a sixth of a training step. The arithmetic is `ops.reference.rotate`: float32 inside, rounded
once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, heads, period, x_row, x_head, sign, HALF: tl.constexpr, HEADS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = head < heads
    at = (row % period) * HALF + pair
    cos = tl.load(cos_ptr + at)
    sin = tl.load(sin_ptr + at) * sign
    x = x_ptr + row * x_row + head * x_head + pair
    a = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32)
    out = out_ptr + (row * heads + head) * (2 * HALF) + pair
    tl.store(out, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out + HALF, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=inside)


def turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """x [..., heads, D]; row r of the flattened rest turns by row r % P of cos, sin float32 [P, D/2] (contiguous)."""
    heads, dim = x.shape[-2:]
    rows = x.reshape(-1, heads, dim)
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        _rotate[(rows.shape[0],)](
            rows, cos, sin, out, heads, cos.shape[0], rows.stride(0), rows.stride(1), sign,
            HALF=dim // 2, HEADS=triton.next_power_of_2(heads), num_warps=2,
        )  # fmt: skip
    return out


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return turn(up, cos, sin, -1.0), None, None  # a rotation's transpose turns back
