"""Attention over paged K/V for a few queries a sequence (decode, verify, draft), and for prompt chunks.

The queries of a sequence and the heads that share a K/V head are packed into the rows of one tile. For few queries the
keys are cut into splits at absolute positions, so that a row's sum has the same order whatever else is in the batch: a
block of keys that a row cannot see leaves its state bitwise unchanged (weights exactly 0, rescaling exactly 1). A second
kernel combines the splits that a row can see, in order. The sum of weights is a matrix product too: its order, unlike that
of a reduction, does not follow from the tile's shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import AttnSpec, KVView
from .common import start

INDEX = ["table", "positions", "row_start"]  # compiled once, however they are aligned
PREFILL_ROWS = 64  # more rows than this of one sequence: a prompt chunk


@dataclass(frozen=True)
class Cut:
    """How keys are cut. A function of the layer: never of the rows, the batch or the length."""

    bn: int  # keys a block; one block's weights are computed together
    warps: int = 4
    stages: int = 2
    fine: int = 128  # keys a split; full layers use fine splits for the first fine_splits of them
    fine_splits: int = 16
    coarse: int = 512  # keys a split beyond that: bounds the partial results at long contexts


def choose_cut(dim: int, dtype: torch.dtype) -> Cut:
    if dtype == torch.float32:
        return Cut(16, warps=8)
    return Cut(32 if dim > 256 else 64)


@triton.jit(do_not_specialize=["slots", "table_stride"], do_not_specialize_on_alignment=INDEX)
def attend_kernel(
    q, keys, values, table, positions, row_start, out, part, part_ml,
    table_stride, page_stride, scale, slots,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    BQ: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, FINE: tl.constexpr, FINE_SPLITS: tl.constexpr, COARSE: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slot, b = tl.program_id(0), tl.program_id(2)
    kv_head, tile = tl.program_id(1) % KV_HEADS, tl.program_id(1) // KV_HEADS
    GROUP: tl.constexpr = HEADS // KV_HEADS
    start(PDL)
    first, end = tl.load(row_start + b), tl.load(row_start + b + 1)
    count = (end - first) * GROUP
    if tile * BQ < count:
        m = tile * BQ + tl.arange(0, BQ)
        ok = m < count
        row = (first + tl.minimum(m, count - 1) // GROUP).to(tl.int64)
        head = kv_head * GROUP + m % GROUP
        at = tl.load(positions + row)  # [BQ]
        tile_end = tl.max(at, 0) + 1
        key_from, key_to = tile_end * 0, tile_end
        if WINDOW > 0:
            key_from = tl.maximum(tl.min(at, 0) - WINDOW + 1, 0) // BN * BN
        if SPLIT:
            if WINDOW > 0:  # slots count from the first split that the sequence's first row can see
                split_from = (tl.maximum(tl.load(positions + first) - WINDOW + 1, 0) // FINE + slot) * FINE
                split_to = split_from + FINE
            else:
                coarse = tl.maximum(slot - FINE_SPLITS, 0)
                split_from = (tl.minimum(slot, FINE_SPLITS) * FINE + coarse * COARSE).to(tl.int64)
                split_to = split_from + tl.where(slot < FINE_SPLITS, FINE, COARSE)
            key_from, key_to = tl.maximum(key_from, split_from), tl.minimum(key_to, split_to)
        if key_from < key_to:
            d = tl.arange(0, DP)
            d_ok = d < D
            query = tl.load(q + row[:, None] * (HEADS * D) + head[:, None] * D + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0)
            top = tl.full((BQ,), float("-inf"), dtype=tl.float32)
            total = tl.zeros((BQ, 16), dtype=tl.float32)
            acc = tl.zeros((BQ, DP), dtype=tl.float32)
            ones = tl.full((BN, 16), 1.0, dtype=values.dtype.element_ty)
            for k in range(key_from, key_to, BN):
                key = k + tl.arange(0, BN)
                live = key < key_to
                page = tl.load(table + b * table_stride + key // PAGE, mask=live, other=0).to(tl.int64)
                at_key = page * page_stride + (kv_head * PAGE + key % PAGE) * D
                mask = live[:, None] & d_ok[None, :]
                kt = tl.load(keys + at_key[:, None] + d[None, :], mask=mask, other=0.0)
                vt = tl.load(values + at_key[:, None] + d[None, :], mask=mask, other=0.0)
                s = tl.dot(query, tl.trans(kt), input_precision=PREC) * scale
                seen = (key[None, :] <= at[:, None]) & live[None, :]
                if WINDOW > 0:
                    seen = seen & (key[None, :] > at[:, None] - WINDOW)
                s = tl.where(seen, s, float("-inf"))
                new = tl.maximum(top, tl.max(s, 1))
                ref = tl.where(new == float("-inf"), 0.0, new)
                p = tl.exp2(s - ref[:, None]).to(vt.dtype)
                fade = tl.exp2(top - ref)[:, None]
                acc = tl.dot(p, vt, acc * fade, input_precision=PREC)
                total = tl.dot(p, ones, total * fade, input_precision=PREC)
                top = new
            mass = tl.max(total, 1)  # all 16 columns are equal
            if SPLIT:
                to = (row * HEADS + head) * slots + slot
                tl.store(part + to[:, None] * D + d[None, :], acc, mask=ok[:, None] & d_ok[None, :])
                tl.store(part_ml + to * 2, top, mask=ok)
                tl.store(part_ml + to * 2 + 1, mass, mask=ok)
            else:
                to = row[:, None] * (HEADS * D) + head[:, None] * D + d[None, :]
                tl.store(out + to, (acc / mass[:, None]).to(out.dtype.element_ty), mask=ok[:, None] & d_ok[None, :])


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["positions", "row_seq", "row_start"])
def combine_kernel(
    part, part_ml, out, positions, row_seq, row_start, slots,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WINDOW: tl.constexpr,
    FINE: tl.constexpr, FINE_SPLITS: tl.constexpr, COARSE: tl.constexpr, SB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one row a program. Blocks of SB splits start at the row's own first split."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start(PDL)
    at = tl.load(positions + row)
    if WINDOW > 0:
        origin = tl.maximum(tl.load(positions + tl.load(row_start + tl.load(row_seq + row))) - WINDOW + 1, 0) // FINE
        lo = tl.maximum(at - WINDOW + 1, 0) // FINE - origin
        hi = at // FINE + 1 - origin
    else:
        lo = at * 0
        late = tl.maximum(at - FINE_SPLITS * FINE, -COARSE)  # floor division is exact from -COARSE on
        hi = tl.where(at < FINE_SPLITS * FINE, at // FINE + 1, FINE_SPLITS + late // COARSE + 1)
    base = (row * HEADS + head) * slots
    d = tl.arange(0, DP)
    d_ok = d < D
    i = tl.arange(0, SB)
    top = tl.full((SB,), float("-inf"), dtype=tl.float32)
    for s in range(lo, hi, SB):
        top = tl.maximum(top, tl.load(part_ml + (base + s + i) * 2, mask=s + i < hi, other=float("-inf")))
    best = tl.max(top, 0)
    mass = tl.zeros((SB,), dtype=tl.float32)
    acc = tl.zeros((SB, DP), dtype=tl.float32)
    for s in range(lo, hi, SB):
        ok = s + i < hi
        weight = tl.exp2(tl.load(part_ml + (base + s + i) * 2, mask=ok, other=float("-inf")) - best)
        mass += weight * tl.load(part_ml + (base + s + i) * 2 + 1, mask=ok, other=0.0)
        o = tl.load(part + (base + s + i)[:, None] * D + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0)
        acc += weight[:, None] * o
    mixed = tl.sum(acc, 0) / tl.sum(mass, 0)
    tl.store(out + (row * HEADS + head) * D + d, mixed.to(out.dtype.element_ty), mask=d_ok)


def split_count(spec: AttnSpec, kv: KVView, cut: Cut) -> int:
    """Slots that cover every key any row of this pass can see: a host number, so that a captured grid stays valid."""
    if spec.window is not None:
        return min(triton.cdiv(kv.max_context, cut.fine), (spec.window + kv.max_rows - 2) // cut.fine + 2)
    fine = min(cut.fine_splits, triton.cdiv(kv.max_context, cut.fine))
    return fine + triton.cdiv(max(0, kv.max_context - cut.fine_splits * cut.fine), cut.coarse)


def attend(q: Tensor, spec: AttnSpec, kv: KVView, pdl: bool, cut: Cut | None = None) -> Tensor:
    keys, values = kv.keys[spec.kv_layer], kv.values[spec.kv_layer]
    assert keys is not None and values is not None
    rows, batch, group, dim = q.shape[0], kv.row_start.shape[0] - 1, spec.heads // spec.kv_heads, spec.head_dim
    cut = cut or choose_cut(dim, q.dtype)
    out = torch.empty_like(q)
    table = kv.tables[spec.group]
    padded, wide = triton.next_power_of_2(dim), q.dtype == torch.float32
    split = kv.max_rows <= PREFILL_ROWS
    packed = kv.max_rows * group
    bq = 16 if wide or (split and packed <= 16) else 32 if split else 64
    slots = split_count(spec, kv, cut) if split else 1
    part = torch.empty((rows, spec.heads, slots, dim), dtype=torch.float32, device=q.device) if split else out
    part_ml = torch.empty((rows, spec.heads, slots, 2), dtype=torch.float32, device=q.device) if split else out
    same = dict(
        HEADS=spec.heads, D=dim, DP=padded, WINDOW=spec.window or 0, FINE=cut.fine, FINE_SPLITS=cut.fine_splits, COARSE=cut.coarse,
        PDL=pdl, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    attend_kernel[(slots, spec.kv_heads * triton.cdiv(packed, bq), batch)](
        q, keys, values, table, kv.positions, kv.row_start, out, part, part_ml,
        table.stride(0), keys.stride(0), spec.scale * 1.4426950408889634, slots,
        KV_HEADS=spec.kv_heads, PAGE=kv.page_size, BQ=bq, BN=cut.bn, SPLIT=split, PREC="tf32x3" if wide else "tf32",
        num_warps=cut.warps if split or padded <= 128 else 8, num_stages=cut.stages, **same,
    )  # fmt: skip
    if split:
        combine_kernel[(rows, spec.heads)](
            part, part_ml, out, kv.positions, kv.row_seq, kv.row_start, slots, SB=16, num_warps=4, **same
        )
    return out
