"""LoRA products by ranges of rows: y + B (scale · A x), each range with the matrices of its slot.

`shrink` runs before the product with the weight: it multiplies x with A by spans of the inner dimension, one program
per span; the last program adds the spans in order, multiplies by the adapter's scale and rounds to B's dtype: u. The
product of u with B (`lowrank_delta`) is added to the rounded product with the weight: in its own kernel (few rows), or
in the next one (`expand`). Spans depend on the width of x alone, and ranks are added 16 at a time. So a row's bits
depend on the row and its adapter only. Rows of slot -1, and matrices that a slot does not change, have u = 0, and to a
product -0.0 is added instead of 0, which changes no bit.

With PDL `shrink` runs next to the product. All its programs first wait for the kernel before, which wrote x, and then
let the product's kernel in. So when a program of the product starts, that kernel is complete and its writes are in L2:
the product reads x (through L2) and writes its own sums without waiting, and waits for `shrink` before it reads u. This
holds only where `shrink` is the kernel right before the product, which is why `Shrunk` knows its x.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..adapter_slots import RANGE_ROWS, RANK_STEP, SlotWeight
from ..cuda.runtime import struct
from .common import epilogue, gate_and_up, gdc_launch_dependents, gdc_wait, pdl_start, precision, prefetch, weight_rows

SPAN_COLUMNS = 128  # a span is a whole number of these
# minimum of them per span; maximum spans
SPAN_STEPS = 3
MAX_SPANS = 24
Lora = struct("lora.cuh", "Lora")
SHRINK_COLUMNS = 128  # that a program of `shrink` fetches at a time; of any number 16 are added at a time
FUSED_RANKS = 128  # ranges times rank up to which the product's own kernel adds the changes


def span_of(k: int) -> int:
    """Columns of a span: a function of the width of x."""
    return SPAN_COLUMNS * max(SPAN_STEPS, triton.cdiv(triton.cdiv(k, SPAN_COLUMNS), MAX_SPANS))


@dataclass(frozen=True)
class Shrunk:
    """scale · A x of all rows, and the inputs of the second product."""

    u: Tensor  # [R, P · r], in B's dtype
    change: SlotWeight
    ranges: Tensor  # int32 [n, 3]
    x: Tensor
    sums: Tensor  # held until the product is launched: its outputs must not lie where `shrink` still writes
    pdl: bool

    @property
    def parts(self) -> int:
        return self.change.a.shape[1]

    @property
    def rank(self) -> int:
        return self.change.a.shape[2]

    @property
    def ends(self) -> tuple[int, int]:
        """Last rows, exclusive, of the first two matrices."""
        ends = [*accumulate(self.change.rows), 0, 0]
        return ends[0], ends[1]

    @property
    def fits(self) -> bool:
        """True if the B of all ranges fit side by side into one program."""
        return triton.next_power_of_2(len(self.ranges)) * self.rank <= FUSED_RANKS

    def follows(self, x: Tensor) -> bool:
        """True if x is complete when its product starts. A copy of x would be made by another kernel, after
        `shrink`."""
        return self.pdl and x is self.x

    def pointers(self, x: Tensor) -> ctypes.Structure:
        tensors = (self.u.data_ptr(), self.change.b.data_ptr(), self.ranges.data_ptr())
        return Lora(*tensors, len(self.ranges), self.parts, *self.ends, self.follows(x))


@triton.jit(do_not_specialize=["rows"])
def shrink_kernel(
    x, a, scale, ranges, sums, u, counters, rows, K, x_stride, span,
    PARTS: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    SPANS: tl.constexpr, PREFETCH: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):
    """u = scale · x · aᵀ for the rows of each range: x [rows, K], a [slots, PARTS, RANK, K], scale float32 [slots,
    PARTS], ranges int32 [n, 3] (first row, rows, slot) -> u [rows, PARTS · RANK]. sums float32 [SPANS, rows, PARTS ·
    RANK]: by span.

    Grid (ranges, SPANS, PARTS · RANK / BR): a program per span and BR ranks of a range; the last span adds them all.
    """
    first = tl.load(ranges + tl.program_id(0) * 3)
    count = tl.load(ranges + tl.program_id(0) * 3 + 1)
    slot = tl.load(ranges + tl.program_id(0) * 3 + 2)
    k_from = tl.program_id(1) * span
    k_to = tl.minimum(k_from + span, K)
    part = tl.program_id(2) // (RANK // BR)
    rank = tl.program_id(2) % (RANK // BR) * BR
    some = tl.maximum(slot, 0)
    ks = tl.arange(0, BK)
    a_row = a + ((some.to(tl.int64) * PARTS + part) * RANK + rank + tl.arange(0, BR)) * K
    if PDL and PREFETCH > 0:
        prefetch(a_row[:, None] + tl.minimum(k_from + tl.arange(0, PREFETCH) * 64, K - 1)[None, :])
    factor = tl.load(scale + some * PARTS + part)
    i = tl.arange(0, BM)
    at = (first + i).to(tl.int64)[:, None] * (PARTS * RANK) + part * RANK + rank + tl.arange(0, BR)[None, :]
    live = (i < count)[:, None] & (tl.arange(0, BR) >= 0)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # after the wait: the product's kernel takes x for complete
    if (slot >= 0) & (factor != 0.0):
        x_ptr = x + (first + i).to(tl.int64)[:, None] * x_stride + ks[None, :]
        acc = tl.zeros((BM, BR), dtype=tl.float32)
        for k in range(k_from, k_to, BK):
            inside = ks[None, :] < k_to - k
            rows_of_x = tl.load(x_ptr + k, mask=(i < count)[:, None] & inside, other=0.0)
            rows_of_a = tl.load(a_row[:, None] + k + ks[None, :], mask=inside, other=0.0)
            acc = tl.dot(rows_of_x, tl.trans(rows_of_a), acc, input_precision=PREC)
        if SPANS == 1:
            tl.store(u + at, (acc * factor).to(u.dtype.element_ty), mask=live)
        else:
            step = rows.to(tl.int64) * (PARTS * RANK)
            tl.store(sums + at + tl.program_id(1) * step, acc, mask=live)
            tl.debug_barrier()
            counter = counters + tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
            done = tl.atomic_add(counter, 1, sem="acq_rel")
            if done == SPANS - 1:
                tl.debug_barrier()
                tl.store(counter, 0)
                acc = tl.zeros((BM, BR), dtype=tl.float32)
                for s in tl.static_range(SPANS):
                    acc += tl.load(sums + at + s * step, mask=live, other=0.0, cache_modifier=".cg")
                tl.store(u + at, (acc * factor).to(u.dtype.element_ty), mask=live)
    elif k_from == 0:
        tl.store(u + at, tl.zeros((BM, BR), dtype=u.dtype.element_ty), mask=live)


def shrink(x: Tensor, change: SlotWeight, ranges: Tensor, counters: Tensor, pdl: bool = False) -> Shrunk:
    """scale · A x of the rows x [R, in]. counters: left at 0; not the product's, next to which this runs."""
    rows, k = x.shape
    _, parts, rank, _ = change.a.shape
    span = span_of(k)
    spans = triton.cdiv(k, span)
    u = x.new_empty((rows, parts * rank), dtype=change.b.dtype)
    sums = x.new_empty((spans, *u.shape), dtype=torch.float32) if spans > 1 else u
    x = x if x.stride(1) == 1 else x.contiguous()
    lines = triton.next_power_of_2(triton.cdiv(span, 64))
    shrink_kernel[(len(ranges), spans, parts * rank // RANK_STEP)](
        x, change.a, change.scale, ranges, sums, u, counters, rows, k, x.stride(0), span, PARTS=parts, RANK=rank,
        BM=RANGE_ROWS, BR=RANK_STEP, BK=SHRINK_COLUMNS, SPANS=spans, PREFETCH=lines if x.element_size() == 2 else 0,
        PREC=precision(x), PDL=pdl, num_warps=2, num_stages=4, maxnreg=64, launch_pdl=pdl,
    )
    return Shrunk(u=u, change=change, ranges=ranges, x=x, sums=sums, pdl=pdl)


@triton.jit
def slots_of(ranges, count, RANGES: tl.constexpr):
    """int64 [RANGES]; 0 where there is none: u is 0 there."""
    r = tl.arange(0, RANGES)
    return tl.maximum(tl.load(ranges + r * 3 + 2, mask=r < count, other=0), 0).to(tl.int64)


@triton.jit
def side_by_side(
    b, ranges, count, w_rows, OUT, rank,
    WIDE: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr, RANGES: tl.constexpr,
):
    """[WIDE, RANGES · BR]: BR ranks from `rank` on of the rows `w_rows` of B [slots, OUT, RANK], of all ranges."""
    slot = slots_of(ranges, count, RANGES)
    at = (slot[None, :, None] * OUT + w_rows[:, None, None]) * RANK + rank + tl.arange(0, BR)[None, None, :]
    return tl.reshape(tl.load(b + at), (WIDE, RANGES * BR))


@triton.jit
def lowrank_delta(
    b, u, ranges, count, rows, live, w_rows, OUT, END_0, END_1,
    BM: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr,
    RANGES: tl.constexpr, SWAP_AB: tl.constexpr, PREC: tl.constexpr,
):
    """float32 [BM, WIDE]: what is added to the product of the rows `rows` (live: valid ones) with the weight's rows
    `w_rows`. u of a row is multiplied with the columns of its own range, and zeros with the others, which changes no
    sum. END_0, END_1: where the first two of PARTS matrices end."""
    r = tl.arange(0, RANGES)
    j = tl.arange(0, BR)
    first = tl.load(ranges + r * 3, mask=r < count, other=0)
    end = first + tl.load(ranges + r * 3 + 1, mask=r < count, other=0)
    in_range = (rows[:, None] >= first[None, :]) & (rows[:, None] < end[None, :])  # [BM, RANGES]
    part_of = (w_rows >= END_0).to(tl.int32) * (PARTS > 1) + (w_rows >= END_1).to(tl.int32) * (PARTS > 2)
    lowest = tl.min(part_of, 0)
    highest = tl.max(part_of, 0)
    delta = tl.zeros((BM, WIDE), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        if (lowest <= part) & (part <= highest):
            acc = tl.zeros((WIDE, BM) if SWAP_AB else (BM, WIDE), dtype=tl.float32)
            for rank in range(0, RANK, BR):
                at = u + rows.to(tl.int64)[:, None] * (PARTS * RANK) + part * RANK + rank + j[None, :]
                of_row = tl.load(at, mask=live[:, None] & (j >= 0)[None, :], other=0.0)
                block = side_by_side(b, ranges, count, w_rows, OUT, rank, WIDE, RANK, BR, RANGES)
                apart = tl.where(in_range[:, :, None], of_row[:, None, :], tl.zeros_like(of_row)[:, None, :])
                apart = tl.reshape(apart, (BM, RANGES * BR))
                if SWAP_AB:
                    acc = tl.dot(block, tl.trans(apart), acc, input_precision=PREC)
                else:
                    acc = tl.dot(apart, tl.trans(block), acc, input_precision=PREC)
            if SWAP_AB:
                acc = tl.trans(acc)
            delta = tl.where((part_of == part)[None, :], acc, delta)
    return tl.where(delta == 0.0, -0.0, delta)


@triton.jit(do_not_specialize=["M"])
def expand_kernel(
    y, u, b, ranges, mul, out, M, N, mul_stride, num_ranges, END_0, END_1,
    BM: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr, MUL: tl.constexpr, ACT: tl.constexpr, PARTS: tl.constexpr,
    RANK: tl.constexpr, BR: tl.constexpr, RANGES: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):
    """out = act(y + u · bᵀ) * mul: y [M, N] (GATED: [M, 2N], gate before up: act(gate) * up), u [M, PARTS · RANK], b
    [slots, N, RANK] -> [M, N]. RANGES: all ranges of the pass, with programs of BM rows; 0: separate programs per
    range.

    Grid (M / BM or ranges, N / BN): a program per tile.
    """
    SIDES: tl.constexpr = 2 if GATED else 1
    WIDE: tl.constexpr = BN * SIDES
    SIDE_BY_SIDE: tl.constexpr = RANGES if RANGES > 0 else 1
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    end = M
    if RANGES == 0:
        ranges += tl.program_id(0) * 3
        num_ranges = 1
        rows = tl.load(ranges) + tl.arange(0, BM)
        end = tl.load(ranges) + tl.load(ranges + 1)
    w_rows = weight_rows(tl.program_id(1) * BN, N, BN, GATED)
    pdl_start(PDL)
    live = rows < end
    at = y + rows.to(tl.int64)[:, None] * (N * SIDES) + w_rows[None, :]
    acc = tl.load(at, mask=live[:, None] & (w_rows >= 0)[None, :], other=0.0).to(tl.float32)
    acc += lowrank_delta(
        b, u, ranges, num_ranges, rows, live, w_rows, N * SIDES, END_0, END_1, BM, WIDE, PARTS, RANK, BR, SIDE_BY_SIDE,
        False, PREC,
    )
    up = acc
    if GATED:
        acc, up = gate_and_up(acc, BM, BN)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    epilogue(acc, up, y, mul, out, rows, cols, end, N, mul_stride, 0.0, GATED, ACT, False, MUL, False)


def expand(y: Tensor, shrunk: Shrunk, act: str = "", mul: Tensor | None = None, pdl: bool = False) -> Tensor:
    """y [R, N] with the changes of the slots, in place; with `act` act(y) * mul, or without mul act(gate) * up."""
    change = shrunk.change
    ranges = shrunk.ranges
    gated = bool(act) and mul is None
    rows = y.shape[0]
    n = y.shape[1] // 2 if gated else y.shape[1]
    whole = shrunk.fits and rows <= 64
    bm = max(RANGE_ROWS, triton.next_power_of_2(rows)) if whole else RANGE_ROWS
    bn = 32 if gated else 64
    out = y.new_empty((rows, n)) if gated else y
    expand_kernel[(triton.cdiv(rows, bm) if whole else len(ranges), triton.cdiv(n, bn))](
        y, shrunk.u, change.b, ranges, y if mul is None else mul, out, rows, n, 0 if mul is None else mul.stride(0),
        len(ranges), *shrunk.ends, BM=bm, BN=bn, GATED=gated, MUL=mul is not None, ACT=act, PARTS=shrunk.parts,
        RANK=shrunk.rank, BR=min(shrunk.rank, FUSED_RANKS), RANGES=triton.next_power_of_2(len(ranges)) if whole else 0,
        PREC=precision(y), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )
    return out
