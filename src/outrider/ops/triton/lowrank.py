"""Low-rank changes by ranges of rows: y + scale · B (A x), each range with the matrices of its slot.

Two kernels per product. `shrink` multiplies x with A by spans of the inner dimension, which have programs of their own
and leave partial sums in float32. `expand` adds the partial sums in the order of the spans, rounds them to B's dtype,
multiplies with B and does what the product's own epilogue does otherwise (gate, multiply). A range has up to 16 rows,
the rows of one matrix instruction; spans depend on the width of x alone; ranks are taken 16 at a time. So a row's bits
depend on the row and its adapter only. Rows of slot -1, and columns of matrices that a slot leaves alone, take no
addition: their bits are those of the product before.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..adapter_slots import RANGE_ROWS, RANK_STEP, SlotWeight
from .common import activate, gdc_launch_dependents, gdc_wait, prefetch

BK = 128  # columns fetched at a time
SPAN_STEPS, MAX_SPANS = 3, 24  # of BK columns a span at least; spans at most
EARLY_ROWS, SCRATCH = 128, 1 << 20  # rows up to which no product takes TMA; float32 sums of as many, rank 256


def span_of(k: int) -> int:
    """Columns of a span: a function of the width of x."""
    steps = triton.cdiv(k, BK)
    return BK * max(SPAN_STEPS, triton.cdiv(steps, MAX_SPANS))


@triton.jit(do_not_specialize=["rows"])
def shrink_kernel(
    x, a, scale, ranges, sums, rows, K, x_stride, span,
    PARTS: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    EARLY: tl.constexpr, PREFETCH: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):
    """sums float32 [spans, rows, PARTS · RANK]. EARLY: the kernel ahead, the product with the weight, begins to let
    this one in only when x is complete; so the sums are made while it runs, and only its end is waited for."""
    first, count = tl.load(ranges + tl.program_id(0) * 3), tl.load(ranges + tl.program_id(0) * 3 + 1)
    slot = tl.load(ranges + tl.program_id(0) * 3 + 2)
    k_from = tl.program_id(1) * span
    k_to = tl.minimum(k_from + span, K)
    part, rank = tl.program_id(2) // (RANK // BR), tl.program_id(2) % (RANK // BR) * BR
    some = tl.maximum(slot, 0)
    changed = (slot >= 0) & (tl.load(scale + some * PARTS + part) != 0.0)
    ks = tl.arange(0, BK)
    a_row = a + ((some.to(tl.int64) * PARTS + part) * RANK + rank + tl.arange(0, BR)) * K
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0 and changed:
            prefetch(a_row[:, None] + tl.minimum(k_from + tl.arange(0, PREFETCH) * 64, K - 1)[None, :])
        if not EARLY:
            gdc_wait()
    if changed:
        i = tl.arange(0, BM)
        x_ptr = x + (first + i).to(tl.int64)[:, None] * x_stride + ks[None, :]
        acc = tl.zeros((BM, BR), dtype=tl.float32)
        for k in range(k_from, k_to, BK):
            inside = ks[None, :] < k_to - k
            # from L2: what another kernel left of this address in L1 may be old where nothing was waited for
            rows_of_x = tl.load(x_ptr + k, mask=(i < count)[:, None] & inside, other=0.0, cache_modifier=".cg")
            rows_of_a = tl.load(a_row[:, None] + k + ks[None, :], mask=inside, other=0.0)
            acc = tl.dot(rows_of_x, tl.trans(rows_of_a), acc, input_precision=PREC)
        to = sums + (tl.program_id(1) * rows + first + i).to(tl.int64)[:, None] * (PARTS * RANK)
        to += part * RANK + rank + tl.arange(0, BR)[None, :]
        tl.store(to, acc, mask=(i < count)[:, None] & (tl.arange(0, BR) >= 0)[None, :])
    if PDL and EARLY:
        gdc_wait()


@triton.jit
def _columns(b, slot, cols, rank, N, RANK: tl.constexpr, BR: tl.constexpr):
    """[BN, BR]: ranks from `rank` on of these rows of B."""
    at = (slot.to(tl.int64) * N + tl.minimum(cols, N - 1)) * RANK + rank
    return tl.load(b + at[:, None] + tl.arange(0, BR)[None, :])


@triton.jit
def _changed(
    y, sums, b, head, factor, slot, part, rows, first, live, cols, N, y_row,
    PARTS: tl.constexpr, RANK: tl.constexpr, SPANS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, PREC: tl.constexpr,
):
    """The rows of y [BM, BN] in float32, with the change of one matrix, rounded as y is. head: the first columns of B,
    which came before the wait."""
    mask = live[:, None] & (cols < N)[None, :]
    value = tl.load(y + y_row[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if factor != 0.0:
        at = sums + first.to(tl.int64) * (PARTS * RANK) + part * RANK
        at += tl.arange(0, BM)[:, None] * (PARTS * RANK) + tl.arange(0, BR)[None, :]
        step = rows.to(tl.int64) * (PARTS * RANK)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for rank in range(0, RANK, BR):
            u = tl.zeros((BM, BR), dtype=tl.float32)
            for s in tl.static_range(SPANS):
                u += tl.load(at + s * step + rank, mask=live[:, None] & (tl.arange(0, BR) >= 0)[None, :], other=0.0)
            block = head
            if rank > 0:
                block = _columns(b, slot, cols, rank, N, RANK, BR)
            acc = tl.dot(u.to(block.dtype), tl.trans(block), acc, input_precision=PREC)
        value = (value + acc * factor).to(y.dtype.element_ty).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["rows"])
def expand_kernel(
    y, sums, b, scale, ranges, mul, out, rows, N, y_stride, mul_stride, out_stride, END_0, END_1,
    PARTS: tl.constexpr, RANK: tl.constexpr, SPANS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, GATED: tl.constexpr, MUL: tl.constexpr, ACT: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):
    """GATED: y [R, N] is gate and up -> act(gate) * up [R, N / 2]; MUL: act(y) * mul; otherwise y itself is changed, in
    the rows that a slot changes. END_0, END_1: where the first two of PARTS matrices end."""
    first, count = tl.load(ranges + tl.program_id(0) * 3), tl.load(ranges + tl.program_id(0) * 3 + 1)
    slot = tl.load(ranges + tl.program_id(0) * 3 + 2)
    begin = tl.program_id(1) * BN
    part = begin * 0
    if PARTS > 1 and not GATED:
        part = (begin >= END_0).to(tl.int32)
        if PARTS > 2:
            part += (begin >= END_1).to(tl.int32)
    cols = begin + tl.arange(0, BN)
    some = tl.maximum(slot, 0)
    factor = tl.where(slot >= 0, tl.load(scale + some * PARTS + part), 0.0)
    head = _columns(b, some, cols, 0, N, RANK, BR)
    up_factor, up_head = factor, head
    if GATED:
        up_factor = tl.where(slot >= 0, tl.load(scale + some * PARTS + 1), 0.0)
        up_head = _columns(b, some, cols + N // 2, 0, N, RANK, BR)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.arange(0, BM)
    live = i < count
    kind = out.dtype.element_ty
    y_row = (first + i).to(tl.int64) * y_stride
    to = out + (first + i).to(tl.int64)[:, None] * out_stride + cols[None, :]
    if GATED:
        mask = live[:, None] & (cols < N // 2)[None, :]
        value = _changed(
            y, sums, b, head, factor, some, 0, rows, first, live, cols, N, y_row, PARTS, RANK, SPANS, BM, BN, BR, PREC
        )
        up = _changed(
            y, sums, b, up_head, up_factor, some, 1, rows, first, live, cols + N // 2, N, y_row, PARTS, RANK, SPANS,
            BM, BN, BR, PREC,
        )
        tl.store(to, (activate(value, ACT).to(kind).to(tl.float32) * up).to(kind), mask=mask)
    elif MUL or factor != 0.0:
        mask = live[:, None] & (cols < N)[None, :]
        value = _changed(
            y, sums, b, head, factor, some, part, rows, first, live, cols, N, y_row, PARTS, RANK, SPANS, BM, BN, BR,
            PREC,
        )
        if MUL:
            at = mul + (first + i).to(tl.int64)[:, None] * mul_stride + cols[None, :]
            other = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            value = activate(value, ACT).to(kind).to(tl.float32) * other
        tl.store(to, value.to(kind), mask=mask)


def columns_of(weight: SlotWeight, gated: bool) -> int:
    """Columns of a program: they belong to one matrix."""
    edges = weight.rows[:1] if gated else weight.rows
    fits = math.gcd(*edges) if len(weight.rows) > 1 else 128
    wide = 64 if sum(weight.rows) <= 8192 else 128
    return max(16, min(wide, fits & -fits))


def lowrank_rows(
    x: Tensor, y: Tensor, weight: SlotWeight, ranges: Tensor, act: str = "", mul: Tensor | None = None, *,
    pdl: bool = False, scratch: Tensor | None = None,
) -> Tensor:
    """y [R, N] with the changes of the slots: as `ReferenceOps.lowrank_rows`. scratch: float32 memory that nothing
    else writes; then x must be complete when the kernel ahead lets the next one in."""
    (rows, k), n, (_, parts, rank, _) = x.shape, y.shape[1], weight.a.shape
    x, gated, span = x if x.stride(1) == 1 else x.contiguous(), bool(act) and mul is None, span_of(x.shape[1])
    spans, bn = triton.cdiv(k, span), columns_of(weight, gated)
    size = spans * rows * parts * rank
    early = scratch is not None and scratch.numel() >= size
    sums = scratch if early and scratch is not None else torch.empty(size, dtype=torch.float32, device=x.device)
    prec = "tf32x3" if x.dtype == torch.float32 else "tf32"
    launch = {"launch_pdl": True} if pdl else {}
    fixed = dict(PARTS=parts, RANK=rank, BM=RANGE_ROWS, BR=RANK_STEP, PREC=prec, PDL=pdl, num_warps=4, **launch)
    shrink_kernel[(ranges.shape[0], spans, parts * rank // RANK_STEP)](
        x, weight.a, weight.scale, ranges, sums, rows, k, x.stride(0), span,
        BK=BK, EARLY=early, PREFETCH=8 if pdl and x.element_size() == 2 else 0, num_stages=4, **fixed,
    )  # fmt: skip
    out = torch.empty((rows, n // 2), dtype=y.dtype, device=y.device) if gated else y
    ends = [*accumulate(weight.rows), 0, 0]
    expand_kernel[(ranges.shape[0], triton.cdiv(out.shape[1], bn))](
        y, sums, weight.b, weight.scale, ranges, y if mul is None else mul, out, rows, n, y.stride(0),
        0 if mul is None else mul.stride(0), out.stride(0), ends[0], ends[1],
        SPANS=spans, BN=bn, GATED=gated, MUL=mul is not None, ACT=act, **fixed,
    )  # fmt: skip
    return out
