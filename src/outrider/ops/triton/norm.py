"""Row-wise kernels: RMSNorm, the fused residual step, embedding rows, gating. One program per row, so rows are
independent."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import DeviceWeight
from ..reference import as_tensor
from .common import Launcher, activate, pdl_start

PROMPT = 256  # rows of a pass of prompts


def width_warps(width: int) -> tuple[int, int]:
    block = triton.next_power_of_2(width)
    return block, max(1, min(16, block // 512))


@triton.jit
def rms_norm_kernel(x, w, out, x_stride, n, eps, WEIGHT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = norm(x) * w, x [R, n] with row stride x_stride -> [R, n]; WEIGHT: there is w [n].

    Grid (R,): a program per row.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = i < n
    if WEIGHT:
        scale = tl.load(w + i, mask=ok, other=0.0)
    pdl_start(PDL)
    h = tl.load(x + row * x_stride + i, mask=ok, other=0.0).to(tl.float32)
    h = h * tl.rsqrt(tl.sum(h * h, 0) / n + eps)
    if WEIGHT:
        h = h * scale
    tl.store(out + row * n + i, h.to(out.dtype.element_ty), mask=ok)


def rms_norm(ops: Launcher, x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    out = x.new_empty(flat.shape)
    block, warps = width_warps(width)
    rms_norm_kernel[(flat.shape[0],)](
        flat, flat if w is None else w, out, flat.stride(0), width, eps,
        WEIGHT=w is not None, BLOCK=block, PDL=ops.pdl, num_warps=warps, launch_pdl=ops.pdl,
    )
    return out.view(x.shape)


@triton.jit(do_not_specialize_on_alignment=["ids"])
def per_layer_kernel(
    ids, table, projected, w, out, layers, scale, factor, eps, n, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """The inputs of the per-layer embeddings: norm(projected * scale) * w + table[ids] * factor, times 1/√2; ids [R],
    table [V, layers · n], projected [R, layers · n], w [n] -> out [layers, R, n].

    Grid (R, layers): a program per row and layer.
    """
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    ok = i < n
    gain = tl.load(w + i, mask=ok, other=0.0)
    pdl_start(PDL)
    kind = out.dtype.element_ty
    at = layer * n + i
    e = tl.load(table + tl.load(ids + row) * layers * n + at, mask=ok, other=0.0).to(tl.float32)
    h = (tl.load(projected + row * layers * n + at, mask=ok, other=0.0).to(tl.float32) * scale).to(kind).to(tl.float32)
    h = (h * tl.rsqrt(tl.sum(h * h, 0) / n + eps) * gain).to(kind).to(tl.float32) + (e * factor).to(kind).to(tl.float32)
    tl.store(
        out + (layer * tl.num_programs(0) + row) * n + i,
        (h.to(kind).to(tl.float32) * 0.7071067811865476).to(kind), mask=ok,
    )


def per_layer_inputs(
    ops: Launcher, ids: Tensor, table: DeviceWeight, projected: Tensor, scale: float, w: Tensor, eps: float
) -> Tensor:
    dense = as_tensor(table)
    rows = projected.shape[0]
    width = w.shape[0]
    layers = projected.shape[1] // width
    out = torch.empty((layers, rows, width), dtype=projected.dtype, device=projected.device)
    factor = float(torch.tensor(width**0.5, dtype=dense.dtype))  # rounded as in embed
    block, warps = width_warps(width)
    per_layer_kernel[(rows, layers)](
        ids, dense, projected, w, out, layers, scale, factor, eps, width, BLOCK=block, PDL=ops.pdl, num_warps=warps,
        launch_pdl=ops.pdl,
    )
    return out


@triton.jit
def residual_norm_kernel(
    x, y, post_w, scale, next_w, second_w, third_w, x_out, h_out, second_out, third_out, n, eps,
    POST: tl.constexpr, SCALE: tl.constexpr, NEXT: tl.constexpr, MORE: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):
    """x_out = (x + y) * scale, POST: y normed first by post_w; NEXT: h_out = norm(x_out) * next_w; MORE: two further
    norms of the same sum. All are [R, n]. EARLY: weights are fetched while the kernel ahead still runs; where there are
    many rows, more programs at a time are worth more than the registers that this takes.

    Grid (R,): a program per row.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = i < n
    kind = x_out.dtype.element_ty
    if POST and EARLY:
        pw = tl.load(post_w + i, mask=ok, other=0.0)
    if NEXT and EARLY:
        nw = tl.load(next_w + i, mask=ok, other=0.0)
    if MORE and EARLY:
        w2 = tl.load(second_w + i, mask=ok, other=0.0)
        w3 = tl.load(third_w + i, mask=ok, other=0.0)
    if SCALE:
        factor = tl.load(scale).to(kind).to(tl.float32)
    pdl_start(PDL)
    b = tl.load(y + row * n + i, mask=ok, other=0.0).to(tl.float32)
    a = tl.load(x + row * n + i, mask=ok, other=0.0).to(tl.float32)
    if POST:
        if not EARLY:
            pw = tl.load(post_w + i, mask=ok, other=0.0)
        b = (b * tl.rsqrt(tl.sum(b * b, 0) / n + eps) * pw).to(kind).to(tl.float32)
    a = (a + b).to(kind)
    if SCALE:
        a = (a.to(tl.float32) * factor).to(kind)
    tl.store(x_out + row * n + i, a, mask=ok)
    if NEXT:
        h = a.to(tl.float32)
        h = h * tl.rsqrt(tl.sum(h * h, 0) / n + eps)
        if not EARLY:
            nw = tl.load(next_w + i, mask=ok, other=0.0)
        tl.store(h_out + row * n + i, (h * nw).to(kind), mask=ok)
        if MORE:
            if not EARLY:
                w2 = tl.load(second_w + i, mask=ok, other=0.0)
                w3 = tl.load(third_w + i, mask=ok, other=0.0)
            tl.store(second_out + row * n + i, (h * w2).to(kind), mask=ok)
            tl.store(third_out + row * n + i, (h * w3).to(kind), mask=ok)


def residual_norm(
    x: Tensor, y: Tensor, post_w: Tensor | None, scale: Tensor | None, next_w: Tensor | None, eps: float, pdl: bool,
    more: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum, and its norms by next_w and more (the sum itself in place of those not asked for)."""
    rows, width = x.shape
    early = rows < PROMPT
    x = x.contiguous()
    y = y.contiguous()
    x_out = torch.empty_like(x)
    h_out = x_out if next_w is None else torch.empty_like(x)
    second, third = (x_out, x_out) if more is None else (torch.empty_like(x), torch.empty_like(x))
    block, warps = width_warps(width)
    residual_norm_kernel[(rows,)](
        x, y, *(x if w is None else w for w in (post_w, scale, next_w)), *(more or (x, x)), x_out, h_out, second, third,
        width, eps, POST=post_w is not None, SCALE=scale is not None, NEXT=next_w is not None, MORE=more is not None,
        BLOCK=block, EARLY=early, PDL=pdl, num_warps=warps, launch_pdl=pdl, **{} if early else {"maxnreg": 64},
    )
    return x_out, h_out, second, third


@triton.jit(do_not_specialize_on_alignment=["ids"])
def embed_kernel(ids, table, out, n, scale, SCALE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = table[ids] (SCALE: * scale); ids [R], table [V, n] -> [R, n].

    Grid (R, n / BLOCK): a program per BLOCK columns of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pdl_start(PDL)
    token = tl.load(ids + row)
    e = tl.load(table + token * n + i, mask=i < n, other=0.0)
    if SCALE:
        e = (e.to(tl.float32) * scale).to(e.dtype)
    tl.store(out + row * n + i, e, mask=i < n)


def embed(ops: Launcher, ids: Tensor, table: DeviceWeight, scale: float) -> Tensor:
    # a column of [B, K] tokens would be read as a row
    dense = as_tensor(table)
    ids = ids.contiguous()
    width = dense.shape[1]
    out = dense.new_empty((ids.shape[0], width))
    factor = float(torch.tensor(scale, dtype=dense.dtype))  # on the host: rounded as the twin rounds it
    embed_kernel[(ids.shape[0], triton.cdiv(width, 2048))](
        ids, dense, out, width, factor, SCALE=scale != 1.0, BLOCK=2048, PDL=ops.pdl, num_warps=4, launch_pdl=ops.pdl,
    )
    return out


@triton.jit
def act_mul_kernel(x, y, out, n, x_stride, y_stride, ACT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = act(x) * y; x and y [R, n] with row strides -> [R, n].

    Grid (R, n / BLOCK): a program per BLOCK columns of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < n
    pdl_start(PDL)
    a = tl.load(x + row * x_stride + i, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(y + row * y_stride + i, mask=ok, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + row * n + i, (activate(a, ACT).to(kind).to(tl.float32) * b).to(kind), mask=ok)


def act_mul(ops: Launcher, x: Tensor, y: Tensor, act: str) -> Tensor:
    rows, width = x.shape
    out = x.new_empty((rows, width))
    act_mul_kernel[(rows, triton.cdiv(width, 1024))](
        x, y, out, width, x.stride(0), y.stride(0), ACT=act, BLOCK=1024, PDL=ops.pdl, num_warps=4, launch_pdl=ops.pdl,
    )
    return out


@triton.jit
def clamp_kernel(x, low, high, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """x [R, n] clamped in place to low and high [n], which are by column.

    Grid (R, n / BLOCK): a program per BLOCK columns of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < n
    least = tl.load(low + i, mask=ok, other=0.0)
    most = tl.load(high + i, mask=ok, other=0.0)
    pdl_start(PDL)
    value = tl.load(x + row * n + i, mask=ok, other=0.0)
    tl.store(x + row * n + i, tl.minimum(tl.maximum(value, least), most), mask=ok)


def clamp_columns(ops: Launcher, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """In place; torch's own does one element at a time where the bounds are broadcast."""
    rows, width = x.shape
    clamp_kernel[(rows, triton.cdiv(width, 1024))](
        x, low, high, width, BLOCK=1024, PDL=ops.pdl, num_warps=4, launch_pdl=ops.pdl
    )
    return x
