"""Training's two Triton kernels: a head's loss with its gradient, and the rotary embedding.

`losses.row_terms` as one kernel: one program per row, three passes over the vocabulary, the logits overwritten by their
gradient. The second and third pass hit the GPU's L2 cache. A rotation in plain torch is eight passes over float32
copies; with six drafter layers, five unrolled steps and thirty target layers that is a sixth of a training step. The
arithmetic is `ops.attention.rotate`: float32 inside, rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _head_terms(
    z_ptr, p_ptr, best_ptr, rows_ptr, weight_ptr, mix_ptr, out_ptr, vocab, z_stride, p_stride, mix_stride, out_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(rows_ptr + row)
    weight = tl.load(weight_ptr + row)
    label = tl.load(best_ptr + source)
    soft = tl.load(mix_ptr + row * mix_stride)
    tv = tl.load(mix_ptr + row * mix_stride + 1)
    hard = tl.load(mix_ptr + row * mix_stride + 2)
    z_row = z_ptr + row * z_stride
    p_row = p_ptr + source * p_stride
    cols = tl.arange(0, BLOCK)

    top = float("-inf")
    total = 0.0
    for lo in range(0, vocab, BLOCK):
        z = tl.load(z_row + lo + cols, mask=lo + cols < vocab, other=float("-inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(z, axis=0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(z - new), axis=0)
        top = new
    lse = top + tl.log(total)
    z_label = tl.load(z_row + label).to(tl.float32)

    cross = 0.0
    alpha = 0.0
    distance = 0.0
    signed = 0.0
    for lo in range(0, vocab, BLOCK):
        inside = lo + cols < vocab
        logq = tl.load(z_row + lo + cols, mask=inside, other=float("-inf")).to(tl.float32) - lse
        logp = tl.load(p_row + lo + cols, mask=inside, other=float("-inf")).to(tl.float32)
        q = tl.exp(logq)
        p = tl.exp(logp)
        cross -= tl.sum(tl.where(inside, p * logq, 0.0), axis=0)
        alpha += tl.sum(tl.minimum(p, q), axis=0)
        distance += 0.5 * tl.sum(tl.abs(p - q), axis=0)
        signed += tl.sum(tl.where(q > p, q, -q), axis=0)
    reach = 0.5 * tv

    for lo in range(0, vocab, BLOCK):
        inside = lo + cols < vocab
        z = tl.load(z_row + lo + cols, mask=inside, other=float("-inf")).to(tl.float32)
        q = tl.exp(z - lse)
        p = tl.exp(tl.load(p_row + lo + cols, mask=inside, other=float("-inf")).to(tl.float32))
        sign = tl.where(q > p, 1.0, -1.0)
        here = tl.where(lo + cols == label, 1.0, 0.0)
        grad = soft * (q - p) + reach * q * (sign - signed) + hard * (q - here)
        tl.store(z_row + lo + cols, (weight * grad).to(z_ptr.dtype.element_ty), mask=inside)

    loss = soft * cross + tv * distance + hard * (lse - z_label)
    tl.store(out_ptr + row * out_stride, weight * loss)
    tl.store(out_ptr + row * out_stride + 1, alpha)
    tl.store(out_ptr + row * out_stride + 2, tl.where(z_label >= top, 1.0, 0.0))


def head_terms(z: Tensor, logp: Tensor, best: Tensor, rows: Tensor, weight: Tensor, mix: Tensor, out: Tensor) -> None:
    """z [A, V] becomes its gradient; out [A, 3]: weighted loss, alpha, hit. mix float32 [A, 3], maybe expanded."""
    vocab = z.shape[1]
    block = min(4096, triton.next_power_of_2(vocab))
    _head_terms[(z.shape[0],)](
        z, logp, best, rows, weight, mix, out, vocab, z.stride(0), logp.stride(0), mix.stride(0), out.stride(0),
        BLOCK=block, num_warps=16 if block >= 4096 else 4,
    )  # fmt: skip


# ---- rotary embedding
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
        return turn(x, cos, sin, sign=1.0)

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return turn(up, cos, sin, sign=-1.0), None, None  # a rotation's transpose turns back
