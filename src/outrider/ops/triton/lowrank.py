"""LoRA products by ranges of rows: y + B (scale · A x), each range with the matrices of its slot.

`shrink` runs before the product with the weight: it multiplies x with A by spans of the inner dimension, one program
per span. Their sums are added in the order of the spans, multiplied by the adapter's scale, rounded to B's dtype,
multiplied with B (`lowrank_delta`), and the result is added to the rounded product: in the product's own kernel (dense
weights, few rows), or in the next one (`expand`). Spans depend on the width of x alone, and ranks are added 16 at a
time. So a row's bits depend on the row and its adapter only. To rows of slot -1, and to columns of matrices that a slot
does not change, -0.0 is added, which changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..adapter_slots import RANGE_ROWS, RANK_STEP, SlotWeight
from .common import epilogue, gate_and_up, gdc_launch_dependents, gdc_wait, pdl_start, prefetch, weight_rows

BK = 128  # columns fetched at a time
SPAN_STEPS, MAX_SPANS = 3, 24  # minimum blocks of BK columns per span; maximum spans
REDUCE_ROWS = 16  # rows up to which each program of a product adds the spans itself
FUSED_RANKS = 128  # ranges times rank up to which the product's own kernel adds the changes


def span_of(k: int) -> int:
    """Columns of a span: a function of the width of x."""
    steps = triton.cdiv(k, BK)
    return BK * max(SPAN_STEPS, triton.cdiv(steps, MAX_SPANS))


@dataclass(frozen=True)
class Shrunk:
    """A x of all rows that a slot changes, and the inputs of the second product."""

    sums: Tensor  # float32 [spans to be added, R, P · r]
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
        """Do all ranges' B lie side by side in one program?"""
        return triton.next_power_of_2(len(self.ranges)) * self.rank <= FUSED_RANKS


@triton.jit(do_not_specialize=["rows"])
def shrink_kernel(
    x, a, scale, ranges, sums, semaphores, rows, K, x_stride, span,
    PARTS: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    SPANS: tl.constexpr, REDUCE: tl.constexpr, PREFETCH: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):
    """sums float32 [SPANS, rows, PARTS · RANK]. REDUCE: the last program of a range adds them, and leaves the sum
    behind them."""
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
        to = sums + (first + i).to(tl.int64)[:, None] * (PARTS * RANK) + part * RANK + rank + tl.arange(0, BR)[None, :]
        live, step = (i < count)[:, None] & (tl.arange(0, BR) >= 0)[None, :], rows.to(tl.int64) * (PARTS * RANK)
        tl.store(to + tl.program_id(1) * step, acc, mask=live)
        if REDUCE:
            tl.debug_barrier()
            counter = semaphores + tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
            done = tl.atomic_add(counter, 1, sem="acq_rel")
            if done == SPANS - 1:
                tl.debug_barrier()
                tl.store(counter, 0)
                acc = tl.zeros((BM, BR), dtype=tl.float32)
                for s in tl.static_range(SPANS):
                    acc += tl.load(to + s * step, mask=live, other=0.0, cache_modifier=".cg")
                tl.store(to + SPANS * step, acc, mask=live)


def shrink(x: Tensor, change: SlotWeight, ranges: Tensor, semaphores: Tensor, pdl: bool = False) -> Shrunk:
    """A x of the rows x [R, in]. Few rows: each program of the product adds the spans itself, which is sooner."""
    (rows, k), (_, parts, rank, _) = x.shape, change.a.shape
    span, reduce = span_of(k), rows > REDUCE_ROWS
    spans = triton.cdiv(k, span)
    sums = torch.empty((spans + reduce, rows, parts * rank), dtype=torch.float32, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    lines = triton.next_power_of_2(triton.cdiv(span, 64))
    shrink_kernel[(len(ranges), spans, parts * rank // RANK_STEP)](
        x, change.a, change.scale, ranges, sums, semaphores, rows, k, x.stride(0), span,
        PARTS=parts, RANK=rank, BM=RANGE_ROWS, BR=RANK_STEP, BK=BK, SPANS=spans, REDUCE=reduce,
        PREFETCH=lines if x.element_size() == 2 else 0, PREC=precision(x), PDL=pdl,
        num_warps=4, num_stages=4, launch_pdl=pdl,
    )
    return Shrunk(sums[spans:] if reduce else sums, change, ranges)


def precision(x: Tensor) -> str:
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


@triton.jit
def side_by_side(
    b, ranges, count, w_rows, OUT, rank,
    WIDE: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr, RANGES: tl.constexpr,
):
    """[WIDE, RANGES · BR]: BR ranks from `rank` on of the rows `w_rows` of B [slots, OUT, RANK], of all ranges."""
    r = tl.arange(0, RANGES)
    slot = tl.maximum(tl.load(ranges + r * 3 + 2, mask=r < count, other=0), 0).to(tl.int64)
    at = (slot[None, :, None] * OUT + w_rows[:, None, None]) * RANK + rank + tl.arange(0, BR)[None, None, :]
    return tl.reshape(tl.load(b + at), (WIDE, RANGES * BR))


@triton.jit
def lowrank_delta(
    head, b, sums, scale, ranges, count, rows, live, M, w_rows, OUT, END_0, END_1,
    BM: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr,
    SPANS: tl.constexpr, RANGES: tl.constexpr, SWAP_AB: tl.constexpr, PREC: tl.constexpr,
):
    """float32 [BM, WIDE]: what is added to the product of the rows `rows` (live: valid ones) with the weight's rows
    `w_rows`. head: the first ranks of `side_by_side`, loaded before the wait. A x of a row is multiplied with the
    columns of its own range, and zeros with the others, which changes no sum. END_0, END_1: where the first two of
    PARTS matrices end."""
    r, j = tl.arange(0, RANGES), tl.arange(0, BR)
    first = tl.load(ranges + r * 3, mask=r < count, other=0)
    end = first + tl.load(ranges + r * 3 + 1, mask=r < count, other=0)
    slot = tl.load(ranges + r * 3 + 2, mask=r < count, other=-1)
    mine = (rows[:, None] >= first[None, :]) & (rows[:, None] < end[None, :]) & (slot >= 0)[None, :]  # [BM, RANGES]
    part_of = (w_rows >= END_0).to(tl.int32) * (PARTS > 1) + (w_rows >= END_1).to(tl.int32) * (PARTS > 2)
    lowest, highest = tl.min(part_of, 0), tl.max(part_of, 0)
    there, step = live[:, None] & (j >= 0)[None, :], M.to(tl.int64) * (PARTS * RANK)
    delta = tl.full((BM, WIDE), -0.0, dtype=tl.float32)
    for part in tl.static_range(PARTS):
        if (lowest <= part) & (part <= highest):
            factor = tl.sum(tl.where(mine, tl.load(scale + tl.maximum(slot, 0) * PARTS + part)[None, :], 0.0), 1)
            own = tl.zeros((WIDE, BM) if SWAP_AB else (BM, WIDE), dtype=tl.float32)
            for rank in range(0, RANK, BR):
                at = sums + rows.to(tl.int64)[:, None] * (PARTS * RANK) + part * RANK + rank + j[None, :]
                u = tl.zeros((BM, BR), dtype=tl.float32)
                for s in tl.static_range(SPANS):
                    u += tl.load(at + s * step, mask=there, other=0.0)
                u = u * factor[:, None]
                block = head
                if RANK > BR and rank > 0:
                    block = side_by_side(b, ranges, count, w_rows, OUT, rank, WIDE, RANK, BR, RANGES)
                apart = tl.where(mine[:, :, None], u[:, None, :], 0.0).to(block.dtype)
                apart = tl.reshape(apart, (BM, RANGES * BR))
                if SWAP_AB:
                    own = tl.dot(block, tl.trans(apart), own, input_precision=PREC)
                else:
                    own = tl.dot(apart, tl.trans(block), own, input_precision=PREC)
            if SWAP_AB:
                own = tl.trans(own)
            delta = tl.where((factor != 0.0)[:, None] & (part_of == part)[None, :], own, delta)
    return delta


@triton.jit(do_not_specialize=["M"])
def expand_kernel(
    y, sums, b, scale, ranges, mul, out, M, N, mul_stride, num_ranges, END_0, END_1,
    BM: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr, MUL: tl.constexpr, ACT: tl.constexpr, PARTS: tl.constexpr,
    RANK: tl.constexpr, BR: tl.constexpr, SPANS: tl.constexpr, RANGES: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [M, N], GATED: [M, 2N], gate before up -> out [M, N]. RANGES: all ranges of the pass, with programs of BM rows;
    0: separate programs per range."""
    SIDES: tl.constexpr = 2 if GATED else 1
    WIDE: tl.constexpr = BN * SIDES
    SIDE_BY_SIDE: tl.constexpr = RANGES if RANGES > 0 else 1
    rows, end = tl.program_id(0) * BM + tl.arange(0, BM), M
    if RANGES == 0:
        ranges += tl.program_id(0) * 3
        num_ranges = 1
        rows = tl.load(ranges) + tl.arange(0, BM)
        end = tl.load(ranges) + tl.load(ranges + 1)
    w_rows = weight_rows(tl.program_id(1) * BN, N, BN, GATED)
    head = side_by_side(b, ranges, num_ranges, w_rows, N * SIDES, 0, WIDE, RANK, BR, SIDE_BY_SIDE)
    pdl_start(PDL)
    live = rows < end
    at = y + rows.to(tl.int64)[:, None] * (N * SIDES) + w_rows[None, :]
    acc = tl.load(at, mask=live[:, None] & (w_rows >= 0)[None, :], other=0.0).to(tl.float32)
    acc += lowrank_delta(
        head, b, sums, scale, ranges, num_ranges, rows, live, M, w_rows, N * SIDES, END_0, END_1, BM, WIDE, PARTS, RANK,
        BR, SPANS, SIDE_BY_SIDE, False, PREC,
    )
    up = acc
    if GATED:
        acc, up = gate_and_up(acc, BM, BN)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    epilogue(acc, up, y, mul, out, rows, cols, end, N, mul_stride, 0.0, GATED, ACT, False, MUL, False)


def expand(y: Tensor, shrunk: Shrunk, act: str = "", mul: Tensor | None = None, pdl: bool = False) -> Tensor:
    """y [R, N] with the changes of the slots, in place; with `act` act(y) * mul, or without mul act(gate) * up."""
    change, ranges, gated = shrunk.change, shrunk.ranges, bool(act) and mul is None
    rows, n = y.shape[0], y.shape[1] // 2 if gated else y.shape[1]
    whole = shrunk.fits and rows <= 64
    bm = max(RANGE_ROWS, triton.next_power_of_2(rows)) if whole else RANGE_ROWS
    bn = 32 if gated else 64
    out = torch.empty((rows, n), dtype=y.dtype, device=y.device) if gated else y
    expand_kernel[(triton.cdiv(rows, bm) if whole else len(ranges), triton.cdiv(n, bn))](
        y, shrunk.sums, change.b, change.scale, ranges, y if mul is None else mul, out, rows, n,
        0 if mul is None else mul.stride(0), len(ranges), *shrunk.ends, BM=bm, BN=bn, GATED=gated, MUL=mul is not None,
        ACT=act, PARTS=shrunk.parts, RANK=shrunk.rank, BR=min(shrunk.rank, FUSED_RANKS), SPANS=len(shrunk.sums),
        RANGES=triton.next_power_of_2(len(ranges)) if whole else 0, PREC=precision(y), PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )
    return out
