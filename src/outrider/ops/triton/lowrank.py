"""Low-rank changes by ranges of rows: y + scale · B (A x), each range with the matrices of its slot.

`shrink` goes before the product with the weight: it multiplies x with A by spans of the inner dimension, which have
programs of their own and leave partial sums in float32. Adding the sums in the order of the spans, rounding them to B's
dtype, multiplying with B and adding what comes of it to the product is the end of the product's own kernel
(`add_lowrank`, dense weights and few ranges) or a kernel behind it (`expand`). Spans depend on the width of x alone,
and ranks are added 16 at a time. So a row's bits depend on the row and its adapter only. Rows of slot -1, and columns
of matrices that a slot leaves alone, take no addition: their bits are those of the product before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..adapter_slots import RANGE_ROWS, RANK_STEP, SlotWeight
from .common import activate, gdc_launch_dependents, gdc_wait, prefetch

BK = 128  # columns fetched at a time
SPAN_STEPS, MAX_SPANS = 3, 24  # of BK columns a span at least; spans at most
FUSED_RANKS = 128  # ranges times rank up to which the product's own kernel adds the changes


def span_of(k: int) -> int:
    """Columns of a span: a function of the width of x."""
    steps = triton.cdiv(k, BK)
    return BK * max(SPAN_STEPS, triton.cdiv(steps, MAX_SPANS))


@dataclass(frozen=True)
class Shrunk:
    """A x of all rows that a slot changes, and what is left to do."""

    sums: Tensor  # float32 [spans, R, P · r]
    change: SlotWeight
    ranges: Tensor  # int32 [n, 3]

    @property
    def parts(self) -> int:
        return self.change.a.shape[1]

    @property
    def rank(self) -> int:
        return self.change.a.shape[2]

    @property
    def ends(self) -> tuple[int, int]:
        """Where the first two matrices end."""
        first, second, *_ = (*accumulate(self.change.rows), 0, 0)
        return first, second

    @property
    def fits(self) -> bool:
        """May the product's own kernel add the changes?"""
        return triton.next_power_of_2(self.ranges.shape[0]) * self.rank <= FUSED_RANKS and not self.rank & self.rank - 1


@triton.jit(do_not_specialize=["rows"])
def shrink_kernel(
    x, a, scale, ranges, sums, rows, K, x_stride, span,
    PARTS: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    PREFETCH: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):
    """sums float32 [spans, rows, PARTS · RANK]."""
    first, count = tl.load(ranges + tl.program_id(0) * 3), tl.load(ranges + tl.program_id(0) * 3 + 1)
    slot = tl.load(ranges + tl.program_id(0) * 3 + 2)
    k_from = tl.program_id(1) * span
    k_to = tl.minimum(k_from + span, K)
    part, rank = tl.program_id(2) // (RANK // BR), tl.program_id(2) % (RANK // BR) * BR
    some = tl.maximum(slot, 0)
    ks = tl.arange(0, BK)
    a_row = a + ((some.to(tl.int64) * PARTS + part) * RANK + rank + tl.arange(0, BR)) * K
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            prefetch(a_row[:, None] + tl.minimum(k_from + tl.arange(0, PREFETCH) * 64, K - 1)[None, :])
    changed = (slot >= 0) & (tl.load(scale + some * PARTS + part) != 0.0)
    if PDL:
        gdc_wait()
    if changed:
        i = tl.arange(0, BM)
        x_ptr = x + (first + i).to(tl.int64)[:, None] * x_stride + ks[None, :]
        acc = tl.zeros((BM, BR), dtype=tl.float32)
        for k in range(k_from, k_to, BK):
            inside = ks[None, :] < k_to - k
            rows_of_x = tl.load(x_ptr + k, mask=(i < count)[:, None] & inside, other=0.0)
            rows_of_a = tl.load(a_row[:, None] + k + ks[None, :], mask=inside, other=0.0)
            acc = tl.dot(rows_of_x, tl.trans(rows_of_a), acc, input_precision=PREC)
        to = sums + (tl.program_id(1) * rows + first + i).to(tl.int64)[:, None] * (PARTS * RANK)
        to += part * RANK + rank + tl.arange(0, BR)[None, :]
        tl.store(to, acc, mask=(i < count)[:, None] & (tl.arange(0, BR) >= 0)[None, :])


def shrink(x: Tensor, change: SlotWeight, ranges: Tensor, pdl: bool = False) -> Shrunk:
    """A x of the rows x [R, in]."""
    (rows, k), (_, parts, rank, _) = x.shape, change.a.shape
    span = span_of(k)
    sums = torch.empty((triton.cdiv(k, span), rows, parts * rank), dtype=torch.float32, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    lines = triton.next_power_of_2(triton.cdiv(span, 64))
    shrink_kernel[(ranges.shape[0], len(sums), parts * rank // RANK_STEP)](
        x, change.a, change.scale, ranges, sums, rows, k, x.stride(0), span,
        PARTS=parts, RANK=rank, BM=RANGE_ROWS, BR=RANK_STEP, BK=BK, PREFETCH=lines if x.element_size() == 2 else 0,
        PREC=precision(x), PDL=pdl, num_warps=4, num_stages=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return Shrunk(sums, change, ranges)


def precision(x: Tensor) -> str:
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


@triton.jit
def range_slots(ranges, count, RANGES: tl.constexpr, RANK: tl.constexpr):
    """The slot of each of RANGES · RANK columns of all ranges' B, side by side; 0 for none."""
    of = tl.arange(0, RANGES * RANK) // RANK
    return tl.maximum(tl.load(ranges + of * 3 + 2, mask=of < count, other=0), 0).to(tl.int64)


@triton.jit
def add_lowrank(
    acc, sums, b, scale, ranges, count, rows, M, w_rows, OUT, END_0, END_1, kind: tl.constexpr,
    BM: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, SPANS: tl.constexpr,
    RANGES: tl.constexpr, SWAP_AB: tl.constexpr, PREC: tl.constexpr,
):
    """acc float32 [BM, WIDE], the product of the rows `rows` with the weight's rows `w_rows`, rounded to `kind`, with
    the changes of up to RANGES ranges of rows, rounded again. All B lie side by side in one product: A x of a row
    stands before the columns of its own range, and nought before the others, which changes no sum."""
    r = tl.arange(0, RANGES)
    first = tl.load(ranges + r * 3, mask=r < count, other=0)
    end = first + tl.load(ranges + r * 3 + 1, mask=r < count, other=0)
    slot = tl.load(ranges + r * 3 + 2, mask=r < count, other=-1)
    mine = (rows[:, None] >= first[None, :]) & (rows[:, None] < end[None, :]) & (slot >= 0)[None, :]  # [BM, RANGES]
    j = tl.arange(0, RANK)
    slots = range_slots(ranges, count, RANGES, RANK)
    block = tl.load(b + (slots[None, :] * OUT + w_rows[:, None]) * RANK + (tl.arange(0, RANGES * RANK) % RANK)[None, :])
    part_of = (w_rows >= END_0).to(tl.int32) * (PARTS > 1) + (w_rows >= END_1).to(tl.int32) * (PARTS > 2)
    lowest, highest = tl.min(part_of, 0), tl.max(part_of, 0)
    live, step = (rows < M)[:, None] & (j >= 0)[None, :], M.to(tl.int64) * (PARTS * RANK)
    value = acc.to(kind).to(tl.float32)
    for part in tl.static_range(PARTS):
        if (lowest <= part) & (part <= highest):
            at = sums + rows.to(tl.int64)[:, None] * (PARTS * RANK) + part * RANK + j[None, :]
            u = tl.zeros((BM, RANK), dtype=tl.float32)
            for s in tl.static_range(SPANS):
                u += tl.load(at + s * step, mask=live, other=0.0)
            apart = tl.where(mine[:, :, None], u[:, None, :], 0.0).to(block.dtype)
            apart = tl.reshape(apart, (BM, RANGES * RANK))
            if SWAP_AB:
                delta = tl.trans(tl.dot(block, tl.trans(apart), input_precision=PREC))
            else:
                delta = tl.dot(apart, tl.trans(block), input_precision=PREC)
            factors = tl.load(scale + tl.maximum(slot, 0) * PARTS + part)
            factor = tl.sum(tl.where(mine, factors[None, :], 0.0), 1)
            changed = (factor != 0.0)[:, None] & (part_of == part)[None, :]
            value = tl.where(changed, tl.fma(delta, factor[:, None], value).to(kind).to(tl.float32), value)
    return value


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
        value = tl.fma(acc, factor, value).to(y.dtype.element_ty).to(tl.float32)
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


def expand(y: Tensor, shrunk: Shrunk, act: str = "", mul: Tensor | None = None, pdl: bool = False) -> Tensor:
    """y [R, N] with the changes of the slots, in place; with `act` act(y) * mul, or without mul act(gate) * up."""
    change, ranges, gated = shrunk.change, shrunk.ranges, bool(act) and mul is None
    spans, rows, _ = shrunk.sums.shape
    n, bn = y.shape[1], columns_of(change, gated)
    out = torch.empty((rows, n // 2), dtype=y.dtype, device=y.device) if gated else y
    expand_kernel[(ranges.shape[0], triton.cdiv(out.shape[1], bn))](
        y, shrunk.sums, change.b, change.scale, ranges, y if mul is None else mul, out, rows, n, y.stride(0),
        0 if mul is None else mul.stride(0), out.stride(0), *shrunk.ends,
        PARTS=shrunk.parts, RANK=shrunk.rank, SPANS=spans, BM=RANGE_ROWS, BN=bn, BR=RANK_STEP,
        GATED=gated, MUL=mul is not None, ACT=act, PREC=precision(y), PDL=pdl, num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
